"""A script of verl's own, with own data and an own reward: two settings turn drafts on, and change no token."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas
import pytest

from sam_recipe.launch.environment import CPU
from tests.end_to_end.runs import MINUTES

CONFIGS = Path(__file__).parents[2] / "configs"
REWARD = (
    "def reward(data_source, solution_str, ground_truth, extra_info=None):\n    return float(len(solution_str) % 7)\n"
)
# What verl's examples of GRPO set, and what a CPU needs.
GRPO = (
    "algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false", "actor_rollout_ref.actor.use_kl_loss=false",
    "data.train_batch_size=4", "data.max_prompt_length=128", "data.max_response_length=96",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16", "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.max_model_len=256",
    "actor_rollout_ref.rollout.max_num_seqs=32", "actor_rollout_ref.actor.optim.lr=1e-4",
    "trainer.total_training_steps=2", "trainer.save_freq=-1", "trainer.test_freq=1", "trainer.val_before_train=true",
    "trainer.logger=[console,file]", "trainer.use_v1=true", "+shared=cpu",
)  # fmt: skip
SEARCH = f"hydra.searchpath=[pkg://sam.configs,file://{CONFIGS}]"  # the second for the CPU's settings alone


@pytest.fixture
def own(tmp_path):
    """A user's folder: data, a reward."""
    prompt = [{"role": "user", "content": "12 + 7 * 3 ="}]
    rows = [
        {"data_source": "mine", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": str(number)}}
        for number in range(16)
    ]
    pandas.DataFrame(rows).to_parquet(tmp_path / "mine.parquet")
    (tmp_path / "reward.py").write_text(REWARD)
    return tmp_path


def train(own, assets, name, *overrides):
    """Run verl's main_ppo; its metrics by step, and its responses."""
    folder = own / name
    data = [f"data.train_files={own}/mine.parquet", f"data.val_files={own}/mine.parquet", f"assets={assets}"]
    reward = [f"reward.custom_reward_function.path={own}/reward.py", "reward.custom_reward_function.name=reward"]
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", SEARCH, *GRPO, *data, *reward, *overrides]
        + [
            f"trainer.default_local_dir={folder}",
            f"trainer.rollout_data_dir={folder}/rollouts",
            f"hydra.run.dir={own}",
        ],
        # Ray's workers would wait for all else on the machine.
        env={**os.environ, **CPU, "RAY_worker_niceness": "0", "VERL_FILE_LOGGER_PATH": str(own / f"{name}.jsonl")},
        capture_output=True,
        text=True,
        timeout=15 * MINUTES,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    logged = [json.loads(line) for line in (own / f"{name}.jsonl").read_text().splitlines()]
    files = sorted((folder / "rollouts").glob("*.jsonl"))
    texts = [sorted(json.loads(line)["output"] for line in file.read_text().splitlines()) for file in files]
    return {row["step"]: row["data"] for row in logged}, texts, done.stdout


@pytest.mark.e2e
def test_two_settings_turn_drafts_on_in_verls_own_trainer(assets, own):
    metrics, texts, said = train(own, assets, "sam", "+speculation=sam", "speculation.policy=always")
    assert "rollout worker: drafter SamProposer, verification exact" in said
    for step in (1, 2):
        assert metrics[step]["rollout/spec_accepted_tokens"] > 0
        assert metrics[step]["rollout/spec_accept_length"] > 1
        tokens = 16 * metrics[step]["response_length/mean"]  # the engine's own count has those accepted behind an end
        assert tokens <= metrics[step]["rollout/tokens"] < 1.1 * tokens
    without, same_texts, _ = train(own, assets, "off", "+speculation=off")
    assert texts == same_texts and len(texts) == 2 and len(texts[0]) == 16
    assert "rollout/spec_drafted_tokens" in without[1] and without[1]["rollout/spec_drafted_tokens"] == 0
