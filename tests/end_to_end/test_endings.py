"""A config of the cluster at scale=smoke, with real verl, Ray and vLLM: ended in five ways, and with a damaged
checkpoint, it repeats an undisturbed run.

Each start but the last goes on to the end of one training step and is ended in the next, so that a start serves both
for what it ends with and for what the one before left.
"""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from omegaconf import OmegaConf

from recipe.sam_dapo.launch.config import compose_config
from recipe.sam_dapo.record.settings import differences
from tests.end_to_end.runs import MINUTES, end, log_of, metrics, responses, start, wait_for_step

CONFIGS = ("dapo_qwen3_32b", "dapo_qwen3_32b_128die", "dapo_qwen3_235b")
NUMBERS = {"num_speculative_tokens", "batch_size_threshold", "max_num_seqs"}  # in which they differ
NAMES = {"config_name", "run_dir", "experiment_name", "default_local_dir"}
STEPS = 5
SETTINGS = (
    "scale=smoke", "data.gen_batch_size=4", "algorithm.filter_groups.enable=false", "speculation.policy=always",
    f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1",
)  # fmt: skip
OF_RUNS = r"ray::|raylet|gcs_server|VLLM::|recipe.sam_dapo\.main_dapo|plasma_store"  # processes
LARGEST = "actor/optim_world_size_1_rank_0.pt"  # of a checkpoint


def kill(process, title):
    """The one process below a run's that bears a title."""
    (found,) = [
        one for one in psutil.Process(process.pid).children(recursive=True) if title in "".join(one.cmdline()[:1])
    ]
    found.kill()


def fill_disk(run_directory, step):
    """The kernel answers every write to the checkpoint's largest file as on a full disk."""
    file = run_directory / "checkpoints" / f"global_step_{step}" / LARGEST
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")


# After the steps that are done, from 0 on: while it starts.
ENDINGS = (
    (130, "interrupted, while starting; ", lambda run, _: run.send_signal(signal.SIGINT)),
    (1, "error: the vLLM engine (process ", lambda run, _: kill(run, "VLLM::EngineCore")),
    (-signal.SIGKILL, "error: the supervisor (process ", lambda run, _: run.kill()),
    (1, "error: a rollout server (process ", lambda run, _: kill(run, "ray::SpeculationServer")),
    (1, "error: no space left on the disk of ", lambda _, run_directory: fill_disk(run_directory, STEPS)),
)


def outside(run_directory):
    """Processes, shared memory and temporary files that a run could leave. What it leaves has lost its parents: engines
    of tests that run beside have them."""
    processes = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if re.search(OF_RUNS, " ".join(process.cmdline())):
                pytests = {one.pid for one in process.parents() if "pytest" in " ".join(one.cmdline())}
                processes |= {process.pid} if pytests <= {os.getpid()} else set()
    scratch = set(Path(tempfile.gettempdir()).glob("sam-*")) | set(Path("/tmp").glob("rl-colocate-zmq-*"))
    return processes | set(Path("/dev/shm").iterdir()) | scratch | set(run_directory.rglob("*.partial*"))


def leaves_nothing(run_directory, before):
    """Waits for shared memory of engines of tests beside, which goes with them; what a run leaves stays."""
    deadline = time.monotonic() + 2 * MINUTES
    while not (left := outside(run_directory) <= before) and time.monotonic() < deadline:
        time.sleep(0.5)
    return left


def test_what_one_config_does_at_this_scale_the_others_do_too():
    first, *others = (OmegaConf.to_container(compose_config(name, ["scale=smoke"])) for name in CONFIGS)
    for other in others:
        assert {key.rpartition(".")[2] for key in differences(first, other)} <= NUMBERS | NAMES


@pytest.mark.e2e
def test_a_run_that_ends_in_five_ways_repeats_an_undisturbed_one(assets, tmp_path):
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    before = outside(disturbed)
    for step, (code, said, act) in enumerate(ENDINGS):
        # Once without a HOME to write to.
        environment = {"HOME": "/nonexistent"} if step == 2 else {}
        run = start(assets, disturbed, *SETTINGS, config=CONFIGS[0], **environment)
        wait_for_step(run, disturbed, step)
        act(run, disturbed)
        _, screen = run.communicate(timeout=5 * MINUTES)
        *progress, last = screen.splitlines()
        assert run.returncode == code and last.startswith(said), (screen, log_of(disturbed)[-3000:])
        again = f"goes on after step {step}" if step else "starts from the beginning (no checkpoint to go on from)"
        assert f"; log: {disturbed}/train.log; " in last and last.endswith(f"the same command {again}")
        resumed = f"resumed from step {step - 1} of {disturbed}"
        assert all(
            line.startswith(("starting", "validation", "step ", "training: ", "warning: ", resumed))
            for line in progress
        ), screen
        assert (resumed in progress) == (step > 1)
        assert log_of(disturbed).endswith(f"{last}\n")
        assert leaves_nothing(disturbed, before), outside(disturbed) - before
        assert not (disturbed / "rollouts" / f"{step + 2}.jsonl").exists()

    (disturbed / "checkpoints" / f"global_step_{STEPS}" / LARGEST).unlink()  # as freed
    (damaged := disturbed / "checkpoints" / f"global_step_{STEPS - 1}").joinpath(LARGEST).write_bytes(b"PK")
    # While another run without speculation goes on beside it.
    both = {disturbed: (), undisturbed: ("speculation=off",)}
    runs = {directory: start(assets, directory, *SETTINGS, *own, config=CONFIGS[0]) for directory, own in both.items()}
    for directory, run in runs.items():
        first, *_, last = end(run, directory)
        assert last.startswith(f"finished after {STEPS} steps; log: {directory}/train.log"), last
        assert (f"{damaged} is damaged" in first) == (directory == disturbed), first
    assert leaves_nothing(disturbed, before), outside(disturbed) - before
    assert "Traceback" not in log_of(undisturbed), "a run that ended well"
    assert len({path.name.rpartition("-")[2] for path in (disturbed / "wandb").glob("offline-run-*")}) == 1

    assert [row["step"] for row in metrics(disturbed)] == list(range(1, STEPS + 1))
    for mine, theirs in zip(metrics(disturbed), metrics(undisturbed), strict=True):
        assert responses(disturbed, mine["step"]) == responses(undisturbed, mine["step"])
        for key in ("actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"):
            assert mine[key] == theirs[key]
        assert mine["rollout/spec_drafted_tokens"] > 0 == theirs["rollout/spec_drafted_tokens"]

    # Stock vLLM's engine takes this config's arguments, and all emit what the run recorded.
    command = [sys.executable, "-m", "sam.command_line", "bench", "--run", str(disturbed), "--rounds", "1"]
    subprocess.run(command, check=True, timeout=10 * MINUTES)
    found = {row["variant"]: row["responses"] for row in json.loads((tmp_path / "stock.json").read_text())["rows"]}
    assert found == {"stock": 16, "off": 16, "sam": 16} and leaves_nothing(disturbed, before)
