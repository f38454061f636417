"""Other models in all of verl: a draft model alone and beside sam, and SmolLM2, which needs the extra `smollm2`. The
same responses as without speculation."""

import pytest

from recipe.sam_dapo.draft_model import Settings, prepare_drafter
from recipe.sam_dapo.report.runs import Run, compare_responses
from recipe.sam_dapo.smollm2.assets import AssetSettings, prepare_assets
from tests.end_to_end.runs import SHORT, end, start

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS = 2


def train(assets, folder, method, *overrides, config="dapo_tiny_cpu"):
    """A run; all that it generates and trains on is what the one named off has generated."""
    overrides = (f"trainer.total_training_steps={STEPS}", "trainer.save_freq=-1", *overrides)
    end(start(assets, folder / method, *overrides, f"speculation={method}", config=config), folder / method)
    run, off = Run.load(folder / method), Run.load(folder / "off")
    same = compare_responses(run, off)
    assert sorted(same) == [*range(1, STEPS + 1)]
    for step, (equal, count) in same.items():
        assert equal == count >= 16
        assert run.metrics[step]["actor/grad_norm"] == off.metrics[step]["actor/grad_norm"] > 0
    return run.metrics


def test_a_draft_model_trains_the_same_policy(assets, tmp_path):
    prepare_drafter(assets, Settings(prompts=24, samples=2, response_tokens=96, steps=60))
    train(assets, tmp_path, "off", *SHORT)
    for method in ("draft_model", "hybrid"):
        for step, found in train(assets, tmp_path, method, *SHORT, "speculation.policy=always").items():
            # Each rollout has new weights of the target, and the draft model, whose own stay, is still right.
            assert found["rollout/drafter/policy_version"] >= step
            names = (f"draft_model_{what}" for what in ("drafted_tokens", "accepted_tokens", "errors"))
            drafted, right, errors = (found[f"rollout/drafter/{name}"] for name in names)
            assert 0 < right <= drafted and errors == found["rollout/drafter/draft_errors"] == 0


def test_smollm2_trains_on_the_same_with_and_without_speculation(tmp_path):
    prepare_assets(tmp_path / "assets", AssetSettings())
    off, sam = (train(tmp_path / "assets", tmp_path, method, config="dapo_smollm2_cpu") for method in ("off", "sam"))
    for step, found in sam.items():
        assert 0.1 < found["rollout/acc_all/mean"] < 0.6
        assert found["rollout/spec_accepted_tokens"] > 0 == off[step]["rollout/spec_drafted_tokens"]
