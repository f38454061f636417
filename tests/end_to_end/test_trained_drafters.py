"""An EAGLE3 head in all of verl, alone and beside sam: the same responses as without speculation."""

import os
import subprocess
import sys

import pytest

from recipe.draft_model.__main__ import KINDS, prepare_drafter
from recipe.draft_model.eagle3 import HeadSettings
from recipe.report.runs import Run, compare_responses

pytestmark = [pytest.mark.e2e, pytest.mark.long]

MINUTES = 60.0
STEPS, PROMPTS, SAMPLES = 2, 4, 4


def train(assets, folder, method, *overrides):
    command = [
        *(sys.executable, "-m", "recipe.main_dapo", "--config-name", "dapo_tiny_cpu", f"speculation={method}"),
        *(f"run_dir={folder / method}", f"assets={assets}", f"data.train_batch_size={PROMPTS}"),
        *(f"data.gen_batch_size={PROMPTS}", f"actor_rollout_ref.rollout.n={SAMPLES}", "data.max_response_length=96"),
        *("reward.reward_kwargs.overlong_buffer_cfg.len=16", "algorithm.filter_groups.enable=false"),
        *(f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", "trainer.test_freq=-1"),
        *("trainer.val_before_train=false", *overrides),
    ]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=dict(os.environ), timeout=10 * MINUTES)
    assert ended.returncode == 0, (ended.stderr[-1000:], (folder / method / "train.log").read_text()[-3000:])
    return Run.load(folder / method)


def test_a_head_trains_the_same_policy(assets, tmp_path):
    head = KINDS["eagle3"]
    prepare_drafter(head, assets, HeadSettings(prompts=24, samples=2, response_tokens=96, steps=60))
    off = train(assets, tmp_path, "off")
    folder = f"speculation.draft_model={assets / head.folder}"
    for method in ("eagle3", "hybrid"):
        run = train(assets, tmp_path, method, folder, "speculation.policy=always")
        assert compare_responses(run, off) == dict.fromkeys(range(1, STEPS + 1), (PROMPTS * SAMPLES,) * 2)
        for step in range(1, STEPS + 1):
            found, without = run.metrics[step], off.metrics[step]
            assert found["actor/grad_norm"] == without["actor/grad_norm"] > 0
            # Each rollout has new weights of the target, and the head, whose own stay, is still right.
            assert found["rollout/drafter/policy_version"] >= step
            assert found["rollout/spec_draft_model_tokens"] > 0
            assert 0.0 < found["rollout/spec_draft_model_accept_rate"] <= 1.0
            assert found["rollout/drafter/draft_model_errors"] == found["rollout/drafter/draft_errors"] == 0
