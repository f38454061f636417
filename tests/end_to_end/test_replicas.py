"""Two replicas of the rollout on a CPU, by verl's own key: the same responses with and without speculation.

With speculation each drafts from the history that both write, and from what the other writes at the same time.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from recipe.report.runs import Run, compare_responses
from sam.history.reading import load

pytestmark = pytest.mark.e2e

MINUTES = 60.0
STEPS, PROMPTS, SAMPLES = 2, 4, 4


def train(assets, folder, method, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu", f"speculation={method}"),
        *("trainer.n_gpus_per_node=2", f"run_dir={folder / method}", f"assets={assets}"),
        # Every step is an epoch over the same prompts.
        *(f"data.train_batch_size={PROMPTS}", f"data.gen_batch_size={PROMPTS}", f"data.train_max_samples={PROMPTS}"),
        *(f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=96"),
        *("reward.reward_kwargs.overlong_buffer_cfg.len=16", "algorithm.filter_groups.enable=false"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.test_freq=-1"),
        *("trainer.val_before_train=false", *overrides),
    ]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ), timeout=10 * MINUTES)
    assert ended.returncode == 0, (ended.stderr[-1000:], (folder / method / "train.log").read_text()[-3000:])
    return Run.load(folder / method)


def test_two_replicas_train_on_the_same_responses_with_and_without_speculation(assets, tmp_path):
    sam, off = train(assets, tmp_path, "sam", "speculation.scope=history"), train(assets, tmp_path, "off")
    responses = PROMPTS * SAMPLES
    assert compare_responses(sam, off) == {step: (responses, responses) for step in range(1, STEPS + 1)}
    for step in range(1, STEPS + 1):
        assert sam.metrics[step]["actor/grad_norm"] == off.metrics[step]["actor/grad_norm"] > 0
        # The engine steps on disk are the first replica's, the metrics are of both.
        first = float(sam.engine_steps(step).emitted.sum())
        assert 0 < first < sam.metrics[step]["rollout/tokens"]
    assert sum(row["rollout/spec_accepted_tokens"] for row in sam.metrics.values()) > 0
    # Each has found what the other wrote in the epoch before, in the file that both write to.
    assert sam.metrics[STEPS]["rollout/drafter/history_found_prompts"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/history_errors"] == 0
    rows = [json.loads(line) for line in (tmp_path / "sam" / "rollouts" / "1.jsonl").read_text().splitlines()]
    for row in rows:
        kept = load(tmp_path / "sam" / "history", [np.array(row["prompt_tokens"], np.int32)])
        texts = [text.tolist() for text in np.split(kept.tokens, kept.offsets[1:-1])]
        own = row["response_tokens"]  # drafts behind the end were verified too, and stay in the engine's text
        assert len(own) < 2 or any(text[: len(own)] == own for text in texts)
    # And what the other wrote at the same time, which `auto` stands for with two replicas.
    assert "speculation.sharing: 2 replicas see" in (tmp_path / "sam" / "train.log").read_text()
    assert sam.metrics[STEPS]["rollout/drafter/sharing_received_tokens"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/siblings_elsewhere"] > 0
    assert sam.metrics[STEPS]["rollout/drafter/sharing_errors"] == 0
    assert sum(row["rollout/spec_drafted_tokens"] for row in off.metrics.values()) == 0
