"""Whole runs, started as a user starts them, on the tiny model."""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from sam_recipe.launch.environment import CPU
from sam_recipe.report.runs import Run

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
# The command of a page: verl's settings of GRPO, and what a CPU needs.
PAGE = Path(__file__).parents[2] / "docs" / "use_with_your_run.md"
VERLS = "python -m verl.trainer.main_ppo "
(BLOCK,) = (block for block in re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.S) if "+shared=cpu" in block)
SEARCH, _, *GRPO = shlex.split(BLOCK.partition(VERLS)[2].replace("\\\n", " "))


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


def own_run(own, assets, name, *overrides):
    """A run of the recipe with a user's own parts; and what its screen said."""
    dumps = f"trainer.validation_data_dir={own / name / 'validation'}"
    screen = end(start(assets, own / name, *OWN, dumps, *overrides, folder=own), own / name)
    return Run.load(own / name), "\n".join(screen)


def verls_run(own, assets, name, *overrides, python=sys.executable, **environment):
    """A run of verl's main_ppo: metrics by step, texts by step and prompt, its log."""
    folder = own / name
    words = [
        SEARCH, *GRPO, f"assets={assets}", "data.train_files=verls.parquet", "data.val_files=verls.parquet",
        "reward.custom_reward_function.path=own_reward.py", "reward.custom_reward_function.name=count",
        "trainer.test_freq=-1", "trainer.logger=[console,file]", *TOOLS, "trainer.n_gpus_per_node=1",
        "actor_rollout_ref.rollout.seed=0", *overrides,
        f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts", f"hydra.run.dir={own}",
    ]  # fmt: skip
    # Ray's workers would wait for all else on the machine.
    variables = CPU | {"RAY_worker_niceness": "0", "VERL_FILE_LOGGER_PATH": str(own / f"{name}.jsonl"), **environment}
    done = subprocess.run(
        [python, "-m", "verl.trainer.main_ppo", *words],
        env=os.environ | variables, cwd=own, capture_output=True, text=True, timeout=15 * MINUTES,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    texts = {}
    for file in (folder / "rollouts").glob("*.jsonl"):
        for row in rows(file):
            texts.setdefault((int(file.stem), int(row["gts"])), []).append(row["output"])
    return {row["step"]: row["data"] for row in rows(own / f"{name}.jsonl")}, texts, done.stdout


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
