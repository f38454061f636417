"""The whole recipe with real verl, Ray and vLLM: ended in six ways, resumed after each, it repeats an undisturbed run.

Each start but the last goes on to the end of one training step and is ended in the next, so that a start serves both
for what it ends with and for what the one before left.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

STEPS = 7
MINUTES = 60.0
STOP_SECONDS = 30.0


def start(assets, run_directory, *overrides, **environment):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu"),
        *(f"run_dir={run_directory}", f"assets={assets}"),
        *("data.train_batch_size=4", "data.gen_batch_size=4", "data.max_response_length=96"),
        *("actor_rollout_ref.rollout.n=4", "reward.reward_kwargs.overlong_buffer_cfg.len=16"),
        *("algorithm.filter_groups.enable=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16"),
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1", "trainer.test_freq=-1"),
        *("trainer.val_before_train=false", *overrides),
    ]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def log_of(run_directory):
    return (run_directory / "train.log").read_text(errors="replace")


def end(process, run_directory):
    _, screen = process.communicate(timeout=12 * MINUTES)
    assert process.returncode == 0, (screen.splitlines()[-1:], screen, log_of(run_directory)[-3000:])
    assert screen.splitlines()[-1].startswith(f"finished after {STEPS} steps; log: {run_directory}/train.log")


def responses(run_directory, step):
    lines = (run_directory / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["response_tokens"] for line in lines]


def metrics(run_directory):
    return [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]


def against_stock(run_directory):
    """What recipe.against_stock finds of a run, with real engines."""
    command = [sys.executable, "-m", "recipe.against_stock", str(run_directory), "--rounds", "1"]
    subprocess.run(command, check=True, timeout=10 * MINUTES)
    return json.loads((run_directory.parent / "stock.json").read_text())


def words_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def is_of_another_pytest(process):
    """What a run leaves has lost its parents."""
    try:
        return any("pytest" in words_of(parent) and parent.pid != os.getpid() for parent in process.parents())
    except psutil.Error:
        return False


def outside(run_directory):
    """Processes, shared memory and temporary files that a run could leave; not engines of tests that run beside."""
    names = ("ray::", "raylet", "gcs_server", "VLLM::", "recipe.main_dapo", "plasma_store")
    processes = [process for process in psutil.process_iter() if any(name in words_of(process) for name in names)]
    found = {process.pid for process in processes if not is_of_another_pytest(process)}
    scratch = set(Path(tempfile.gettempdir()).glob("sam-*")) | set(Path("/tmp").glob("rl-colocate-zmq-*"))
    return found | set(Path("/dev/shm").iterdir()) | scratch | set(run_directory.rglob("*.partial*"))


def leaves_nothing(run_directory, before):
    """Waits for shared memory of engines of tests beside, which goes with them; what a run leaves stays."""
    deadline = time.monotonic() + 2 * MINUTES
    while not (left := outside(run_directory) <= before) and time.monotonic() < deadline:
        time.sleep(1.0)
    return left


def wait_for_step(process, run_directory, step):
    """verl logs a step only after its checkpoint: ended between the two, the run would lose that row for good."""
    deadline = time.monotonic() + 10 * MINUTES
    metrics_file = run_directory / "metrics.jsonl"
    while not metrics_file.exists() or f'"step": {step},' not in metrics_file.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError((f"step {step} did not end", process.stderr.read(), log_of(run_directory)[-3000:]))
        time.sleep(0.05)
    time.sleep(0.1)  # into the next step's rollout


def kill(process, title):
    (found,) = [one for one in psutil.Process(process.pid).children(recursive=True) if title in one.cmdline()[:1][0]]
    found.kill()


def fill_disk(run_directory, step):
    """The kernel answers every write to the checkpoint's largest file as on a full disk."""
    folder = run_directory / "checkpoints" / f"global_step_{step}" / "actor"
    folder.mkdir(parents=True)
    (folder / "optim_world_size_1_rank_0.pt").symlink_to("/dev/full")


ENDINGS = (
    (130, "interrupted, in step 2; ", lambda run, _: run.send_signal(signal.SIGINT)),
    (1, "error: the vLLM engine (process ", lambda run, _: kill(run, "VLLM::EngineCore")),
    (1, "error: a rollout server (process ", lambda run, _: kill(run, "ray::SpeculationServer")),
    (1, "error: a worker of the trainer (process ", lambda run, _: kill(run, "ray::WorkerDict")),
    (-signal.SIGKILL, "error: the supervisor (process ", lambda run, _: run.kill()),
    (1, "error: no space left on the disk of ", lambda _, run_directory: fill_disk(run_directory, STEPS)),
)


def test_a_run_that_ends_in_six_ways_repeats_an_undisturbed_one(assets, tmp_path):
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    before = outside(disturbed)
    for step, (code, said, act) in enumerate(ENDINGS, start=1):
        # Once without a HOME to write to.
        run = start(assets, disturbed, **({"HOME": "/nonexistent"} if step == 2 else {}))
        wait_for_step(run, disturbed, step)
        act(run, disturbed)
        _, screen = run.communicate(timeout=2 * STOP_SECONDS if step < STEPS - 1 else 5 * MINUTES)
        *progress, last = screen.splitlines()
        assert run.returncode == code and last.startswith(said), (screen, log_of(disturbed)[-3000:])
        assert f"; log: {disturbed}/train.log; " in last and last.endswith(f"same command goes on after step {step}")
        said = ("starting", "training: ", "warning: ", f"resumed from step {step - 1} of {disturbed}")
        assert all(line.startswith(said) for line in progress), screen
        assert (said[-1] in progress) == (step > 1) and "changed since then" not in screen
        assert log_of(disturbed).endswith(f"{last}\n")
        assert leaves_nothing(disturbed, before), outside(disturbed) - before
        assert not (disturbed / "rollouts" / f"{step + 2}.jsonl").exists()

    # While another run without speculation goes on beside it.
    resumed = start(assets, disturbed)
    end(start(assets, undisturbed, "speculation=off"), undisturbed)
    end(resumed, disturbed)
    assert leaves_nothing(disturbed, before), outside(disturbed) - before
    assert "Traceback" not in log_of(undisturbed), "a run that ended well"
    assert len({path.name.rpartition("-")[2] for path in (disturbed / "wandb").glob("offline-run-*")}) == 1

    for step in range(1, STEPS + 1):
        assert responses(disturbed, step) == responses(undisturbed, step)
    assert [row["step"] for row in metrics(disturbed)] == list(range(1, STEPS + 1))
    for key in ("actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"):
        assert metrics(disturbed)[-1][key] == metrics(undisturbed)[-1][key]
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(disturbed)) > 0
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(undisturbed)) == 0

    # Stock vLLM's engine takes this config's arguments, and all emit what the run recorded.
    rows = against_stock(disturbed)["rows"]
    assert list(rows) == ["stock", "off", "sam"] and leaves_nothing(disturbed, before)
    assert {row["as_recorded"] for row in rows.values()} == {16}
