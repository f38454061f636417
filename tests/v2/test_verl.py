"""verl's own GRPO script with vLLM's second model runner: two steps with `sam`, router and chunks, and with `off`."""

import functools
import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from recipe.sam_dapo.launch import fork_server
from recipe.sam_dapo.launch.environment import CPU
from recipe.sam_dapo.trainer import IMPORTED_ONCE
from tests.end_to_end.runs import rows
from tests.end_to_end.test_verl_script import GRPO, SEARCH
from tests.v2.second_on_cpu import ON_IMPORT

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
STEPS = 2


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Trains: prompts and responses by step, metrics by step, the log.

    Workers and engines come from a process that has imported all, and has given vLLM what it lacks on a CPU.
    """
    folder = tmp_path_factory.mktemp("verl")
    assets = [sys.executable, "-m", "recipe.sam_dapo.tiny.assets", "--output", str(folder / "assets")]
    subprocess.run(assets, check=True, cwd=REPOSITORY)
    (folder / "sitecustomize.py").write_text(ON_IMPORT)
    variables = CPU | {
        "VLLM_USE_V2_MODEL_RUNNER": "1", "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
        # Ray's workers would wait for all else on the machine. A token of Ray's own would not reach the server.
        "RAY_worker_niceness": "0", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as short:  # sockets lie below
        python = fork_server.start(Path(short), IMPORTED_ONCE, variables)
        variables[fork_server.EXECUTABLE] = str(python)
        yield functools.partial(train, folder, variables)


def train(folder: Path, variables: dict[str, str], method: str, *overrides: str) -> tuple[dict, dict, str]:
    words = [
        SEARCH, f"+speculation={method}", *GRPO, f"assets={folder}/assets", "trainer.logger=[console,file]",
        "data.max_response_length=40",  # the interpreter takes most of the time
        f"trainer.total_training_steps={STEPS}", f"trainer.rollout_data_dir={folder}/{method}",
        f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}",
        f"++ray_kwargs.ray_init.runtime_env.py_executable={variables[fork_server.EXECUTABLE]}", *overrides,
    ]  # fmt: skip
    log = folder / f"{method}.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    environment = os.environ | variables | {"VERL_FILE_LOGGER_PATH": str(log)}
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    texts = {}
    for file in (folder / method).glob("*.jsonl"):
        texts[int(file.stem)] = sorted((row["input"], row["output"]) for row in rows(file))
    return texts, {row["step"]: row["data"] for row in rows(log)}, done.stdout


def test_two_steps_train_on_the_same_responses(start):
    texts, metrics, said = start("sam", "speculation.policy=always", "+routing=context", "routing.chunk_tokens=16")
    assert said.count("rollout worker: drafter SamSpeculator, verification exact") == 1
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0 == metrics[step]["rollout/drafter/draft_errors"]
        assert metrics[step]["rollout/routing/admissions"] > 16, "chunks"
    expected, of_off, _ = start("off")
    assert texts == expected and len(texts) == STEPS and all(len(rows) == 16 for rows in texts.values())
    for step in range(1, STEPS + 1):
        assert metrics[step]["actor/grad_norm"] == pytest.approx(of_off[step]["actor/grad_norm"], rel=1e-5)
