"""The whole recipe with real verl, Ray and vLLM: it is interrupted, resumed, and repeats an undisturbed run exactly."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.e2e

STEPS = 2
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


def end(process, seconds):
    _, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors[-3000:]


def responses(run_directory, step):
    lines = (run_directory / "rollouts" / f"{step}.jsonl").read_text().splitlines()
    return [json.loads(line)["response_tokens"] for line in lines]


def metrics(run_directory):
    return [json.loads(line) for line in (run_directory / "metrics.jsonl").read_text().splitlines()]


def leftovers():
    names = ("ray::", "raylet", "gcs_server", "VLLM::", "recipe.main_dapo", "plasma_store")
    processes = [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"]]
    return {process.pid for process in processes if any(name in " ".join(process.info["cmdline"]) for name in names)}


def interrupt_after_first_step(process, run_directory):
    """verl logs a step only after its checkpoint: interrupted between the two, the run would lose that row for good."""
    deadline = time.monotonic() + 8 * MINUTES
    metrics_file = run_directory / "metrics.jsonl"
    while not metrics_file.exists() or '"step": 1' not in metrics_file.read_text():
        assert process.poll() is None and time.monotonic() < deadline, "the first step did not end"
        time.sleep(0.05)
    assert (run_directory / "checkpoints" / "latest_checkpointed_iteration.txt").exists()
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=STOP_SECONDS)
    assert process.returncode == 130


def test_interrupted_and_resumed_run_repeats_an_undisturbed_one(assets, tmp_path):
    before, shared_memory = leftovers(), set(Path("/dev/shm").iterdir())
    interrupted, undisturbed = tmp_path / "interrupted", tmp_path / "undisturbed"

    process = start(assets, interrupted)
    interrupt_after_first_step(process, interrupted)
    assert leftovers() == before
    assert set(Path("/dev/shm").iterdir()) <= shared_memory
    assert not (interrupted / "rollouts" / f"{STEPS}.jsonl").exists(), "interrupted too late to show anything"

    # The second time without a HOME to write to, while another run without speculation goes on beside it.
    resumed = start(assets, interrupted, HOME="/nonexistent")
    end(start(assets, undisturbed, "speculation=off"), 12 * MINUTES)
    end(resumed, 12 * MINUTES)
    assert leftovers() == before
    assert set(Path("/dev/shm").iterdir()) <= shared_memory

    for step in range(1, STEPS + 1):
        assert responses(interrupted, step) == responses(undisturbed, step)
    assert [row["step"] for row in metrics(interrupted)] == [1, 2]
    for key in ("actor/entropy", "actor/pg_loss", "actor/grad_norm", "critic/rewards/mean"):
        assert metrics(interrupted)[-1][key] == metrics(undisturbed)[-1][key]
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(interrupted)) > 0
    assert sum(row["rollout/spec_drafted_tokens"] for row in metrics(undisturbed)) == 0
