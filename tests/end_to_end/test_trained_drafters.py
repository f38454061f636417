"""A draft model in all of verl, alone and beside sam: the same responses as without speculation."""

import pytest

from sam_recipe.draft_model import Settings, prepare_drafter
from sam_recipe.report.runs import Run, compare_responses
from tests.end_to_end.runs import SHORT, end, start

pytestmark = [pytest.mark.e2e, pytest.mark.long]

STEPS, RESPONSES = 2, 16


def train(assets, folder, method, *overrides):
    length = f"trainer.total_training_steps={STEPS}"
    end(start(assets, folder / method, *SHORT, length, f"speculation={method}", *overrides), folder / method)
    return Run.load(folder / method)


def test_a_draft_model_trains_the_same_policy(assets, tmp_path):
    prepare_drafter(assets, Settings(prompts=24, samples=2, response_tokens=96, steps=60))
    off = train(assets, tmp_path, "off")
    for method in ("draft_model", "hybrid"):
        run = train(assets, tmp_path, method, "speculation.policy=always")
        assert compare_responses(run, off) == dict.fromkeys(range(1, STEPS + 1), (RESPONSES,) * 2)
        for step in range(1, STEPS + 1):
            found, without = run.metrics[step], off.metrics[step]
            assert found["actor/grad_norm"] == without["actor/grad_norm"] > 0
            # Each rollout has new weights of the target, and the draft model, whose own stay, is still right.
            assert found["rollout/drafter/policy_version"] >= step
            drafted, right = (found[f"rollout/drafter/draft_model_{what}_tokens"] for what in ("drafted", "accepted"))
            assert 0 < right <= drafted
            assert found["rollout/drafter/draft_model_errors"] == found["rollout/drafter/draft_errors"] == 0
