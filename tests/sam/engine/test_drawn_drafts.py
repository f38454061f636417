"""Drafts that are drawn from a draft model's distribution, in a real engine: accepted more often, and lossless."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.sam.engine.draft_model_runs import SMALL, K, drafter_of, save_draft_model
from tests.sam.engine.tiny_engine import VOCABULARY, generate, save_model

pytestmark = pytest.mark.engine

REQUESTS, TOKENS = 24, 60


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A draft model that is much like its target, whose text is far from certain."""
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=6.0)
    second = target.network.model.layers[1]
    with torch.no_grad():
        for weight in (second.self_attn.o_proj.weight, second.mlp.down_proj.weight):
            weight.mul_(0.2)
    target.network.save_pretrained(target.path)
    return target, save_draft_model(target, tmp_path_factory.mktemp("draft"))


def run(models, method="draft_model", requests=REQUESTS, tokens=TOKENS, verification="exact", how=None, **engine):
    """All drawn at temperature 1 but for every sixth, which is greedy."""
    target, draft = models
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 6).tolist() for _ in range(requests)]
    settings = [{"max_tokens": tokens, "seed": row, "temperature": float(row % 6 != 0)} for row in range(requests)]
    speculative, speculation, seen = None, {"method": "off"}, {}
    if how:
        speculative = {"method": "draft_model", "model": draft.path, "num_speculative_tokens": K}
        speculative["disable_padded_drafter_batch"] = not engine.get("async_scheduling")
        speculation = {
            "method": method, "draft_model": draft.path, "policy": "always", "cross_prompt": False,
            "draft_sample_method": how,
        }  # fmt: skip

    def then(llm):
        if how:
            seen.update(drafter_of(llm).counters)

    result = generate(
        target, prompts, settings, speculative, verification=verification, speculation=speculation, then=then, **engine
    )
    return SimpleNamespace(prompts=prompts, counters=seen, **vars(result))


@pytest.fixture(scope="module")
def off(models):
    return run(models)


@pytest.mark.parametrize("method", ["draft_model", "hybrid"])
def test_the_same_tokens_and_more_of_them_accepted(models, off, method):
    greedy, drawn = (run(models, method, how=how) for how in ("greedy", "probabilistic"))
    for one in (greedy, drawn):
        assert one.tokens == off.tokens and one.logprobs == off.logprobs
        assert one.counters["draft_model_errors"] == one.counters["draft_errors"] == 0
    assert drawn.accepted > 1.2 * greedy.accepted > 100


def test_the_same_tokens_with_preemptions(models, off):
    drawn = run(models, how="probabilistic", **SMALL | {"num_gpu_blocks_override": 40})
    assert drawn.tokens == off.tokens and drawn.preemptions > 0


def test_the_same_tokens_under_asynchronous_scheduling(models, off, asynchronous):
    drawn = run(models, how="probabilistic", async_scheduling=True)
    assert drawn.tokens == off.tokens and drawn.counters["draft_model_errors"] == 0
    assert drawn.accepted > 300


@pytest.mark.statistical
@pytest.mark.parametrize("method", ["draft_model", "hybrid"])
def test_rejection_sampling_with_the_drafts_probabilities_is_lossless(models, method):
    """Drafts are accepted as min(p, q) allows."""
    greedy = run(models, method, 100, 100, "rejection", "greedy")
    drawn = run(models, method, 100, 100, "rejection", "probabilistic")
    assert drawn.accepted > 1.2 * greedy.accepted
    check_distribution(models, drawn)


@pytest.mark.statistical
def test_it_is_lossless_under_asynchronous_scheduling(models, asynchronous):
    """There the host does not know the drafts when they are verified."""
    drawn = run(models, "draft_model", 100, 100, "rejection", "probabilistic", async_scheduling=True)
    assert drawn.accepted > 5000
    check_distribution(models, drawn)


def check_distribution(models, drawn):
    """Chi-square of each token's place in the target's distribution."""
    assert drawn.counters["draft_model_errors"] == 0
    noise, values = np.random.default_rng(1), []
    for row, (prompt, tokens) in enumerate(zip(drawn.prompts, drawn.tokens, strict=True)):
        if row % 6 == 0:
            continue
        with torch.no_grad():
            logits = models[0].network(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        p = logits.double().softmax(-1).numpy()
        own = p[np.arange(len(tokens)), tokens]
        before = (p * (p > own[:, None])).sum(axis=1)
        values.extend(before + noise.random(len(tokens)) * own)
    seen = np.histogram(values, bins=40, range=(0.0, 1.0))[0]
    assert len(values) == 83 * 100 and stats.chisquare(seen).pvalue > 1e-4


def test_drafts_with_wrong_probabilities_would_be_seen(models, monkeypatch):
    """A control: the same test of drafts that claim to come from another distribution."""
    from sam.vllm.trained import passes

    drawn_drafts = passes.drawn_drafts

    def wrong(*arguments):
        choose = drawn_drafts(*arguments)

        def choose_wrong(logits, pass_):
            found = choose(logits, pass_)
            return found._replace(probabilities=torch.full_like(found.probabilities, 1.0 / VOCABULARY))

        return choose_wrong

    monkeypatch.setattr(passes, "drawn_drafts", wrong)
    with pytest.raises(AssertionError):
        test_rejection_sampling_with_the_drafts_probabilities_is_lossless(models, "draft_model")
