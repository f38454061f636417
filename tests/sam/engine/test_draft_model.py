"""A draft model in a real engine: the same tokens with it, without it, after pauses, and whatever goes wrong in it."""

import pytest
import torch

from tests.sam.engine.draft_model_runs import FAULTS, PROMPTS, SETTINGS, SMALL, TOKENS, run, save_draft_model
from tests.sam.engine.tiny_engine import generate, save_model

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    return target, save_draft_model(target, tmp_path_factory.mktemp("draft"))


@pytest.fixture(scope="module")
def results(models):
    off = generate(models[0], PROMPTS, SETTINGS, speculation={"method": "off"}, **SMALL)
    return {"off": off, **{method: run(*models, method) for method in ("draft_model", "hybrid")}}


METHODS = pytest.mark.parametrize("method", ["draft_model", "hybrid"])


@METHODS
def test_identical_tokens_greedy_and_drawn(results, method):
    off, on = results["off"], results[method]
    assert on.first.installed["drafter"] == "TrainedProposer"
    assert on.first.tokens == off.tokens and on.first.logprobs == off.logprobs
    assert on.invalid_at_first == 0
    assert on.first.accepted > 100 and on.first.preemptions > 0
    for one in (on.always, on.paused, on.never):
        assert one.tokens == off.tokens
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
        assert one.counters["draft_model_invalid_drafts"] == 0


def test_drafts_after_a_pause_are_those_of_a_draft_model_that_never_paused(results, models):
    always, paused = results["draft_model"].always, results["draft_model"].paused
    common = always.drafts.keys() & paused.drafts.keys()
    assert len(common) > 50 and max(paused.missed) > 5
    assert all(always.drafts[text] == paused.drafts[text] for text in common)
    for text in list(paused.drafts)[::5]:
        ids = torch.tensor([text])
        for token in paused.drafts[text]:
            assert models[1].network(ids).logits[0, -1].argmax() == token
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)


def test_siblings_share_what_the_draft_model_has_read(results):
    prompts = sum(map(len, PROMPTS))
    paused = results["draft_model"].paused
    # Blocks of shared prompts are read once, by whichever request comes first, but for those that start together.
    assert min(paused.missed) >= 1 and paused.counters["draft_model_read_tokens"] < prompts + 12 * TOKENS


@METHODS
def test_the_draft_models_weights_are_its_own(results, method):
    assert results[method].load_format == "auto"


@METHODS
def test_no_pass_in_the_off_phase(results, method):
    never = results[method].never
    assert never.counters["draft_model_steps"] == never.counters["draft_model_passes"] == 0 and not never.drafts


@METHODS
def test_a_draft_model_that_rests_for_a_whole_rollout_is_said_once(results, method):
    found = results[method].left_off
    assert [one["draft_model_steps"] for one in found.counters] == [0, 0]
    assert all(one["draft_model_rests"] > 2 for one in found.counters)
    (said,) = [line for line in found.said if "left off" in line]
    assert "0%, 0%, 0% are accepted by position" in said


@METHODS
def test_its_acceptance_is_that_of_the_rollout(results, method):
    one = results[method]
    assert one.steps.draft_model_drafted_tokens == one.more["draft_model_drafted_tokens"] > 0
    assert one.steps.draft_model_accepted_tokens == one.more["draft_model_accepted_tokens"]
    assert one.steps.draft_model_accepted_tokens > 0
    assert one.no_steps.draft_model_drafted_tokens == one.no_steps.draft_model_accepted_tokens == 0


@METHODS
@pytest.mark.parametrize("how", FAULTS)
def test_a_broken_draft_model_changes_no_token_and_is_said_once(results, method, how):
    found = results[method].broken[how]
    assert found.tokens == results["off"].tokens
    assert found.counters[FAULTS[how]] > 0 and found.counters["draft_errors"] == 0
    assert found.counters["draft_model_accepted_tokens"] == 0
    assert len([line for line in found.said if "draft model failed" in line or "gave no token" in line]) == 1
