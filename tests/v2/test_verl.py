"""verl's own GRPO script with vLLM's second model runner: two steps with `sam`, router and chunks, and with `off`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from recipe.sam_dapo.launch.environment import CPU
from tests.end_to_end.test_verl_script import GRPO, SEARCH
from tests.v2.second_on_cpu import ON_IMPORT

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
STEPS = 2


@pytest.fixture(scope="module")
def assets(tmp_path_factory):
    folder = tmp_path_factory.mktemp("verl")
    command = [sys.executable, "-m", "recipe.sam_dapo.tiny.assets", "--output", str(folder / "assets")]
    subprocess.run(command, check=True, cwd=REPOSITORY)
    (folder / "sitecustomize.py").write_text(ON_IMPORT)
    return folder


def train(folder: Path, method: str, *overrides: str) -> tuple[dict[int, list[tuple[str, str]]], dict[int, float], str]:
    """Prompts and responses by step, gradient norms by step, and the log."""
    words = [
        SEARCH, f"+speculation={method}", *GRPO, f"assets={folder}/assets", "trainer.logger=[console,file]",
        f"trainer.total_training_steps={STEPS}", f"trainer.rollout_data_dir={folder}/{method}",
        f"trainer.default_local_dir={folder}/checkpoints", f"hydra.run.dir={folder}", "speculation.policy=always",
        *overrides,
    ]  # fmt: skip
    variables = CPU | {
        "VLLM_USE_V2_MODEL_RUNNER": "1", "VERL_FILE_LOGGER_PATH": f"{folder}/{method}.jsonl",
        "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)]),
    }  # fmt: skip
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    done = subprocess.run(command, env=os.environ | variables, cwd=folder, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    rows = {
        int(file.stem): [json.loads(line) for line in file.read_text().splitlines()]
        for file in (folder / method).glob("*.jsonl")
    }
    texts = {step: sorted((row["input"], row["output"]) for row in found) for step, found in rows.items()}
    metrics = map(json.loads, (folder / f"{method}.jsonl").read_text().splitlines())
    norms = {row["step"]: row["data"] for row in metrics}
    return texts, norms, done.stdout


def test_two_steps_train_on_the_same_responses(assets):
    texts, metrics, said = train(assets, "sam", "+routing=context", "routing.chunk_tokens=24")
    assert said.count("rollout worker: drafter SamSpeculator, verification exact") == 1
    for step in range(1, STEPS + 1):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0 == metrics[step]["rollout/drafter/draft_errors"]
        assert metrics[step]["rollout/routing/admissions"] > 16, "chunks"
    expected, of_off, _ = train(assets, "off")
    assert texts == expected and len(texts) == STEPS and all(len(rows) == 16 for rows in texts.values())
    for step in range(1, STEPS + 1):
        assert metrics[step]["actor/grad_norm"] == pytest.approx(of_off[step]["actor/grad_norm"], rel=1e-5)
