"""Whole runs, started as a user starts them, on the tiny model."""

import json
import os
import subprocess
import sys
import time

from recipe.sam_dapo.record import STARTING_ENGINES
from recipe.sam_dapo.report.runs import Run

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
# A user's data, two replicas of so many slots, tools; rounds of so many prompts, in the data's order.
STEPS, PROMPTS, SAMPLES, SLOTS, TURNS = 2, 8, 4, 3, 4
TOOLS = (
    "trainer.n_gpus_per_node=2", f"actor_rollout_ref.rollout.max_num_seqs={SLOTS}", "data.shuffle=false",
    "data.max_response_length=96", "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.multi_turn.function_tool_path=calculator.py",
    "actor_rollout_ref.rollout.multi_turn.format=sums",
    f"actor_rollout_ref.rollout.multi_turn.max_assistant_turns={TURNS}",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", f"trainer.total_training_steps={STEPS}",
)  # fmt: skip
OWN = (
    *TOOLS, "data.train_batch_size=4", f"data.gen_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}",
    "data.train_files=own.parquet", "data.val_files=repeated.parquet", "trainer.save_freq=-1",
    f"trainer.test_freq={STEPS}", "actor_rollout_ref.rollout.agent.agent_loop_config_path=loops.yaml",
    "reward.custom_reward_function.path=own_reward.py", "reward.custom_reward_function.name=judge",
    "+reward.custom_reward_function.reward_kwargs.scale=3.0", "reward.reward_kwargs.overlong_buffer_cfg.enable=false",
    "speculation.policy=always",
)  # fmt: skip


def start(assets, run_directory, *overrides, config="dapo_tiny_cpu", folder=None, **environment):
    """A run as a process; `folder`: in which it starts."""
    command = [sys.executable, "-m", "recipe.sam_dapo.main_dapo", "--config-name", config, f"run_dir={run_directory}"]
    words, variables = [*command, f"assets={assets}", *overrides], {**os.environ, **environment}
    return subprocess.Popen(words, cwd=folder, env=variables, stderr=subprocess.PIPE, text=True)


def end(process, run_directory):
    """Waits for a run that ends well; returns the lines on the screen."""
    _, screen = process.communicate(timeout=30 * MINUTES)
    assert process.returncode == 0, (screen[-1000:], log_of(run_directory)[-3000:])
    return screen.splitlines()


def own_run(own, assets, name, *overrides):
    """A run of the recipe with a user's own parts; and what its screen said."""
    dumps = f"trainer.validation_data_dir={own / name / 'validation'}"
    screen = end(start(assets, own / name, *OWN, dumps, *overrides, folder=own), own / name)
    return Run.load(own / name), "\n".join(screen)


def log_of(run_directory):
    return (run_directory / "train.log").read_text(errors="replace")


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def metrics(run_directory):
    return rows(run_directory / "metrics.jsonl")


def responses(run_directory, step):
    return [row["response_tokens"] for row in rows(run_directory / "rollouts" / f"{step}.jsonl")]


def wait_for_step(process, run_directory, step):
    """Until a step has ended; 0: until the engines start. verl logs a step only after its checkpoint: ended between the
    two, the run would lose that row for good."""
    name, sign = ("metrics.jsonl", f'"step": {step},') if step else ("state.json", STARTING_ENGINES)
    file, deadline = run_directory / name, time.monotonic() + 10 * MINUTES
    while not file.exists() or sign not in file.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError((f"step {step} did not end", process.stderr.read(), log_of(run_directory)[-3000:]))
        time.sleep(0.05)
    time.sleep(0.1)  # into the next step's rollout
