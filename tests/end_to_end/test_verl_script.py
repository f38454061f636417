"""A script of verl's own, with own data, an own reward and own tools: two settings turn drafts on, one more the router,
and no token changes; nor where an asynchronous trainer interrupts responses for new weights, and they go on."""

import functools
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from recipe.sam_dapo.launch import fork_server
from recipe.sam_dapo.launch.environment import CPU
from recipe.sam_dapo.tiny.tokenizer import build_tokenizer
from recipe.sam_dapo.trainer import IMPORTED_ONCE
from sam.record.responses import read_responses
from tests.end_to_end.conftest import AGENTS
from tests.end_to_end.runs import MINUTES, PROMPTS, SAMPLES, STEPS, TOOLS, rows

pytestmark = pytest.mark.e2e

# The command of a page: verl's settings of GRPO, and what a CPU needs.
PAGE = Path(__file__).parents[2] / "docs" / "use_with_your_run.md"
VERLS = "python -m verl.trainer.main_ppo "
(BLOCK,) = (block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "+shared=cpu" in block)
SEARCH, _, *GRPO = shlex.split(BLOCK.partition(VERLS)[2].replace("\\\n", " "))
SAM = ("+speculation=sam", "speculation.policy=always")
# Staleness of one: a step waits for the prompts of the step before. Four slots: 32 responses take turns. With a
# learning rate of 0 all versions of the weights are one.
LATE = (
    "trainer.v1.sampler.max_off_policy_threshold=2", "trainer.v1.sampler.max_off_policy_strategy=wait",
    "trainer.v1.sampler.custom_sampler.path=impatient.py", "trainer.v1.sampler.custom_sampler.name=Impatient",
    "actor_rollout_ref.rollout.max_num_seqs=4", "actor_rollout_ref.actor.optim.lr=0",
)  # fmt: skip
COLOCATED = ("trainer.v1.trainer_mode=colocate_async",)
APART = (
    "trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=file",
    "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=by_file", "ray_kwargs.ray_init.num_gpus=2",
)  # fmt: skip


def train(own, assets, name, *overrides, **environment):
    """A run of verl's main_ppo: metrics by step, texts by step and prompt, its log."""
    folder = own / name
    words = [
        SEARCH, *GRPO, f"assets={assets}", "data.train_files=verls.parquet", "data.val_files=verls.parquet",
        "reward.custom_reward_function.path=own_reward.py", "reward.custom_reward_function.name=count",
        "trainer.test_freq=-1", "trainer.logger=[console,file]", *TOOLS, "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.seed=0", *SAM, *overrides,
        f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts", f"hydra.run.dir={own}",
    ]  # fmt: skip
    # Ray's workers would wait for all else on the machine.
    variables = CPU | {"RAY_worker_niceness": "0", "VERL_FILE_LOGGER_PATH": f"{folder}.jsonl", **environment}
    command, texts = [sys.executable, "-m", "verl.trainer.main_ppo", *words], defaultdict(list)
    pipes = {"capture_output": True, "text": True, "timeout": 15 * MINUTES}
    done = subprocess.run(command, env=os.environ | variables, cwd=own, **pipes)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for file in (folder / "rollouts").glob("*.jsonl"):
        for row in rows(file):
            texts[int(file.stem), int(row["gts"])].append(row["output"])
    return {row["step"]: row["data"] for row in rows(own / f"{name}.jsonl")}, texts, done.stdout


@pytest.fixture(scope="module")
def forked(own, assets):
    """Runs whose workers and engines come from a process that has imported all: that is half of a run's time."""
    with tempfile.TemporaryDirectory() as folder:  # short: sockets lie below
        # A token that Ray made itself would not reach a process that has imported Ray before.
        variables = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        variables["PYTHONPATH"] = os.pathsep.join([str(own), os.environ.get("PYTHONPATH", "")])
        python = fork_server.start(Path(folder), IMPORTED_ONCE, CPU | variables)
        variables[fork_server.EXECUTABLE] = str(python)
        setting = f"++ray_kwargs.ray_init.runtime_env.py_executable={python}"
        yield lambda name, *overrides: train(own, assets, name, *overrides, setting, **variables)


@pytest.fixture(scope="module")
def wanted(off):
    """The texts of the first weights by prompt, of the run without drafts; without those that its reward refused."""
    decode, found = functools.partial(build_tokenizer().decode, skip_special_tokens=True), defaultdict(Counter)
    for row in read_responses(off[0].directory, 1):
        if row.round == 0 and AGENTS[row.prompt] != "two_drafts":
            found[row.prompt][decode(row.response_tokens)] += 1
    return found


def assert_same(texts, wanted, prompts):
    """In each of the steps `texts` has each of these prompts' responses, the wanted ones."""
    assert len(texts) == prompts
    compared = {prompt: found for (_, prompt), found in texts.items() if prompt in wanted}
    for prompt, found in compared.items():
        assert len(found) == SAMPLES and wanted[prompt] <= Counter(found), prompt
    assert sum(wanted[prompt].total() for prompt in compared) > prompts * SAMPLES // 2


def total(metrics, name):
    """Over the steps; a step whose responses are all there already has no engine steps."""
    found = [row[name] for row in metrics.values() if name in row]
    assert found
    return sum(found)


def test_two_settings_turn_drafts_on_in_verls_own_trainer(forked, wanted):
    metrics, texts, said = forked("verls", "+routing=context", "routing.chunk_tokens=24")
    assert said.count("rollout worker: drafter SamProposer, verification exact") == 1
    assert_same({key: found for key, found in texts.items() if key[0] == 1}, wanted, 4)
    for step in range(1, STEPS + 1):
        found = metrics[step]
        assert found["rollout/spec_accepted_tokens"] > 0 == found["rollout/drafter/draft_errors"]
        assert found["rollout/spec_accept_length"] > 1 < found["rollout/spec_accept_length/turn_2"]
        assert found["rollout/routing/admissions"] > 16, "chunks, and later turns"
        # What tools gave is in a response and no engine's.
        assert 0 < found["rollout/tokens"] < 16 * found["response_length/mean"]


@pytest.mark.parametrize("mode", [COLOCATED, pytest.param(APART, marks=pytest.mark.long)], ids=lambda mode: mode[0])
def test_responses_are_the_same_wherever_they_are_interrupted(forked, wanted, mode):
    metrics, texts, _ = forked(mode[0].rpartition("=")[2], *LATE, *mode)
    assert_same(texts, wanted, PROMPTS)
    for row in metrics.values():
        assert row["training/off_policy/trajectory_staleness/max"] <= 1
    assert max(row["training/off_policy/trajectory_spans/max"] for row in metrics.values()) == 2, "none was interrupted"
    assert total(metrics, "rollout/spec_accepted_tokens") > 0 == total(metrics, "rollout/drafter/draft_errors")
    assert 0 < total(metrics, "rollout/seconds") < total(metrics, "timing_s/step"), "of a batch that never empties"
