"""Whole runs, started as a user starts them, on the tiny model."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

MINUTES = 60.0
# A step of 16 short responses that are all trained on, whatever their answers; no checkpoint, no validation.
SHORT = (
    "data.train_batch_size=4", "data.gen_batch_size=4", "data.max_response_length=96",
    "actor_rollout_ref.rollout.n=4", "reward.reward_kwargs.overlong_buffer_cfg.len=16",
    "algorithm.filter_groups.enable=false", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
    "trainer.save_freq=-1", "trainer.test_freq=-1", "trainer.val_before_train=false",
    "speculation.policy=always",  # goodput measures an engine for seconds when it starts
)  # fmt: skip


def start(assets, run_directory, *overrides, config="dapo_tiny_cpu", folder=None, python=sys.executable, **environment):
    """A run as a process; `folder`: in which it starts."""
    command = [python, "-m", "sam_recipe.main_dapo", "--config-name", config, f"run_dir={run_directory}"]
    return subprocess.Popen(
        [*command, f"assets={assets}", *overrides],
        cwd=folder,
        env={**os.environ, **environment},
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process, run_directory):
    """Waits for a run that ends well; returns the lines on the screen."""
    _, screen = process.communicate(timeout=30 * MINUTES)
    assert process.returncode == 0, (screen[-1000:], log_of(run_directory)[-3000:])
    return screen.splitlines()


def log_of(run_directory):
    return (run_directory / "train.log").read_text(errors="replace")


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(run_directory):
    return rows(run_directory / "metrics.jsonl")


def responses(run_directory, step):
    return [row["response_tokens"] for row in rows(run_directory / "rollouts" / f"{step}.jsonl")]


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
    """The one process below a run's that bears a title."""
    (found,) = [one for one in psutil.Process(process.pid).children(recursive=True) if title in one.cmdline()[:1][0]]
    found.kill()


def outside(run_directory):
    """Processes, shared memory and temporary files that a run could leave; not engines of tests that run beside."""
    names = ("ray::", "raylet", "gcs_server", "VLLM::", "sam_recipe.main_dapo", "plasma_store")
    processes = [process for process in psutil.process_iter() if any(name in _words_of(process) for name in names)]
    found = {process.pid for process in processes if not _is_of_another_pytest(process)}
    scratch = set(Path(tempfile.gettempdir()).glob("sam-*")) | set(Path("/tmp").glob("rl-colocate-zmq-*"))
    return found | set(Path("/dev/shm").iterdir()) | scratch | set(run_directory.rglob("*.partial*"))


def leaves_nothing(run_directory, before):
    """Waits for shared memory of engines of tests beside, which goes with them; what a run leaves stays."""
    deadline = time.monotonic() + 2 * MINUTES
    while not (left := outside(run_directory) <= before) and time.monotonic() < deadline:
        time.sleep(1.0)
    return left


def _words_of(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_of_another_pytest(process):
    """What a run leaves has lost its parents."""
    try:
        return any("pytest" in _words_of(parent) and parent.pid != os.getpid() for parent in process.parents())
    except psutil.Error:
        return False
