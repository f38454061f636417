"""An EAGLE3 head in a real engine, alone and beside sam: the same tokens with it, without it, after pauses, broken."""

from types import SimpleNamespace

import pytest
import torch

from sam.config import SpeculationConfig
from sam.vllm.plugin import check_installed
from tests.sam.engine.draft_model_runs import (
    FAULTS,
    PROMPTS,
    SETTINGS,
    SMALL,
    K,
    again,
    broken,
    drafter_of,
    left_off,
    load_format_of,
    prefer_model,
    recorded,
    runner_of,
)
from tests.sam.engine.eagle_head import ReferenceHead, fit_output_layer, save_head
from tests.sam.engine.tiny_engine import generate, save_model

pytestmark = pytest.mark.engine

LONG = PROMPTS[0] * 10  # whose response ends where the engine's longest sequence does, at 256 tokens


def run(target, head, then, method="eagle3"):
    settings = {"method": method, "draft_model": str(head), "policy": "always", "cross_prompt": False}
    settings["draft_sample_method"] = "greedy"  # a draft is then a function of the text
    config = SpeculationConfig(num_speculative_tokens=K, **settings)
    asked = config.vllm_arguments()["speculative_config"]
    made = generate(target, PROMPTS, SETTINGS, asked, speculation=settings, then=then, **SMALL)
    check_installed(config, made.installed)
    return made


def fit(llm, head):
    """Fit the head to the text of one rollout."""
    trained, seen, model = drafter_of(llm).trained, {}, drafter_of(llm).model
    draft, compute = trained.run_passes, model.compute_logits

    def recording_draft(batch, missing, count):
        fresh = []
        model.compute_logits = lambda hidden: (fresh.append(hidden.clone()), compute(hidden))[1]
        found = draft(batch, missing, count)
        for row, length, state in zip(batch.rows, batch.lengths, fresh[0], strict=True):
            seen[tuple(batch.texts[row, :length].tolist())] = state
        return found

    trained.run_passes = recording_draft
    try:
        tokens = again(llm)
    finally:
        trained.run_passes = draft
        del model.compute_logits
    after = {}
    for prompt, response in zip(PROMPTS, tokens, strict=True):
        for length, token in enumerate(response):
            after[tuple(prompt + list(response[:length]))] = token
    known = [text for text in seen if text in after]
    fit_output_layer(head, torch.stack([seen[text] for text in known]), torch.tensor([after[text] for text in known]))


def kept_weights(llm):
    """Names of the weights kept for a sleep, and of those that a sleep would have lost for good."""
    drafter, passes = drafter_of(llm), drafter_of(llm).trained.passes
    passes.keep_weights(runner_of(llm).model)
    before = {name: value.clone() for name, value in drafter.model.state_dict().items()}
    for name in passes._kept_weights:
        drafter.model.state_dict()[name].zero_()
    drafter.weights_updated()
    lost = [name for name, value in drafter.model.state_dict().items() if not torch.equal(value, before[name])]
    kept, passes._kept_weights = set(passes._kept_weights), {}
    return SimpleNamespace(kept=kept, lost=lost)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    head, seen, hybrid = tmp_path_factory.mktemp("head"), SimpleNamespace(), SimpleNamespace()
    save_head(target, head)

    def then(llm):
        seen.load_format = load_format_of(llm)
        seen.always = recorded(llm, range(10))
        seen.paused = recorded(llm, (3, 4, 9))
        seen.never = recorded(llm, ())
        seen.beside_a_long_one = recorded(llm, (3, 4, 9), [LONG, *PROMPTS[1:]])
        seen.left_off = left_off(llm)
        seen.broken = {how: broken(llm, how) for how in FAULTS}
        seen.weights = kept_weights(llm)

    def beside_sam(llm):
        hybrid.always, hybrid.paused, hybrid.never = (recorded(llm, pattern) for pattern in (range(10), (3, 4, 9), ()))
        prefer_model(drafter_of(llm))  # for all, after the steps it missed
        hybrid.for_all = recorded(llm, (3, 4, 9))
        del drafter_of(llm).trained.acceptance.expected
        hybrid.left_off = left_off(llm)
        hybrid.broken = {how: broken(llm, how) for how in FAULTS}

    seen.target, seen.head = target, head
    seen.off = generate(target, PROMPTS, SETTINGS, speculation={"method": "off"}, **SMALL)
    seen.random = run(target, head, lambda llm: fit(llm, head))
    seen.first = run(target, head, then)
    hybrid.first = run(target, head, beside_sam, "hybrid")
    seen.methods = {"eagle3": seen, "hybrid": hybrid}
    return seen


METHODS = pytest.mark.parametrize("method", ["eagle3", "hybrid"])


def test_identical_tokens_greedy_and_drawn(results):
    off = results.off
    assert results.first.installed["drafter"] == "Eagle3Proposer"
    for one in (results.random, results.first):
        assert one.tokens == off.tokens and one.logprobs == off.logprobs
        assert one.drafted > 0 and one.preemptions > 0
    assert results.first.accepted > 100
    for one in (results.always, results.paused, results.never):
        assert one.tokens == off.tokens
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
        assert one.counters["draft_model_invalid_drafts"] == 0


def test_drafts_are_those_of_the_published_head(results):
    reference = ReferenceHead(results.target, results.head)
    for one in (results.always, results.paused, results.beside_a_long_one):
        texts = list(one.drafts)[::5]
        assert len(texts) > 20
        with torch.no_grad():
            assert [one.drafts[text] for text in texts] == [reference.draft(list(text), K) for text in texts]


def test_drafts_after_a_pause_are_those_of_a_head_that_never_paused(results):
    always, paused = results.always, results.paused
    common = always.drafts.keys() & paused.drafts.keys()
    assert len(common) > 50 and max(paused.missed) > 5
    assert all(always.drafts[text] == paused.drafts[text] for text in common)


def test_states_are_kept_beside_a_request_without_room_for_a_draft(results):
    found = results.beside_a_long_one
    assert len(found.tokens[0]) == 256 - len(LONG)
    assert found.tokens[1:] == results.off.tokens[1:]
    assert found.counters["draft_model_errors"] == found.counters["draft_model_invalid_drafts"] == 0


def test_hybrid_drafts_with_the_head_and_with_sam(results):
    hybrid, off = results.methods["hybrid"], results.off
    assert hybrid.first.installed["drafter"] == "Eagle3Proposer" and hybrid.first.preemptions > 0
    for one in (hybrid.first, hybrid.always, hybrid.paused, hybrid.never, hybrid.for_all):
        assert one.tokens == off.tokens
    assert hybrid.first.logprobs == off.logprobs
    assert 0 < len(hybrid.always.drafts) < len(results.always.drafts)  # the others are sam's
    for one in (hybrid.always, hybrid.paused, hybrid.for_all):
        assert one.counters["draft_errors"] == one.counters["draft_model_errors"] == 0
    reference = ReferenceHead(results.target, results.head)
    texts = list(hybrid.for_all.drafts)[::5]
    assert len(texts) > 20 and max(hybrid.for_all.missed) > 5
    with torch.no_grad():
        assert [hybrid.for_all.drafts[text] for text in texts] == [reference.draft(list(text), K) for text in texts]


@METHODS
def test_a_head_that_rests_for_a_whole_rollout_is_said_once(results, method):
    found = results.methods[method].left_off
    assert [one["draft_model_steps"] for one in found.counters] == [0, 0]
    assert len([line for line in found.said if "left off" in line]) == 1


@METHODS
def test_no_pass_in_the_off_phase(results, method):
    never = results.methods[method].never
    assert never.counters["draft_model_steps"] == never.counters["draft_model_passes"] == 0 and not never.drafts


def test_its_own_weights_outlive_a_sleep(results):
    assert results.load_format == "auto"
    assert not results.weights.lost
    # The target's embeddings, which the head shares, come with the weight sync.
    assert "model.fc.weight" in results.weights.kept and "model.embed_tokens.weight" not in results.weights.kept


@METHODS
@pytest.mark.parametrize("how", FAULTS)
def test_a_broken_head_changes_no_token(results, method, how):
    found = results.methods[method].broken[how]
    assert found.tokens == results.off.tokens
    assert found.counters[FAULTS[how]] > 0 and found.counters["draft_errors"] == 0
    assert found.counters["draft_model_accepted_tokens"] == 0
    assert len([line for line in found.said if "draft model failed" in line or "gave no token" in line]) == 1
