"""Drafts that are drawn from a draft model's distribution, in a real engine: accepted more often, and lossless."""

import contextlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.sam.engine.draft_model_runs import SMALL, K, save_draft_model
from tests.sam.engine.tiny_engine import VOCABULARY, Engine, save_model

pytestmark = pytest.mark.engine

REQUESTS, TOKENS = 24, 60
LIMIT = 1e-4  # p-value below which two distributions count as different


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


@contextlib.contextmanager
def started(models, method, verification="exact", **engine):
    """An engine whose drafts are greedy or drawn, as `ask` is told."""
    target, draft = models
    speculative = {"method": "draft_model", "model": draft.path, "num_speculative_tokens": K}
    speculative["disable_padded_drafter_batch"] = not engine.get("async_scheduling")
    speculation = {"method": method, "draft_model": draft.path, "policy": "always", "cross_prompt": False}
    arguments = (None, {"method": "off"}) if method == "off" else (speculative, speculation)
    with Engine(target, arguments[0], verification=verification, speculation=arguments[1], **engine) as started:
        yield started


def ask(engine, how=None, requests=REQUESTS, tokens=TOKENS):
    """All drawn at temperature 1 but for every sixth, which is greedy."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 6).tolist() for _ in range(requests)]
    settings = [{"max_tokens": tokens, "seed": row, "temperature": float(row % 6 != 0)} for row in range(requests)]
    if how:
        passes = engine.runner.drafter.trained.passes
        passes.config = replace(passes.config, draft_sample_method=how)
    found = engine.generate(prompts, settings)
    found.prompts = prompts
    if how:
        counters = engine.runner.drafter.counters
        assert counters["draft_model_errors"] == counters["draft_errors"] == 0
    return found


@pytest.fixture(scope="module")
def off(models):
    with started(models, "off") as engine:
        return ask(engine)


@pytest.mark.parametrize(
    ("method", "blocks"), [("draft_model", {}), ("hybrid", SMALL | {"num_gpu_blocks_override": 40})]
)
def test_the_same_tokens_and_more_of_them_accepted(models, off, method, blocks):
    """Of hybrid with preemptions."""
    with started(models, method, **blocks) as engine:
        greedy, drawn = (ask(engine, how) for how in ("greedy", "probabilistic"))
    for one in (greedy, drawn):
        assert one.tokens == off.tokens and one.logprobs == off.logprobs
        assert (one.preemptions > 0) == bool(blocks)
    assert drawn.accepted > 1.2 * greedy.accepted > 100


def test_the_same_tokens_under_asynchronous_scheduling(models, off, asynchronous):
    with started(models, "draft_model", async_scheduling=True) as engine:
        drawn = ask(engine, "probabilistic")
    assert drawn.tokens == off.tokens and drawn.accepted > 300


@pytest.mark.statistical
@pytest.mark.parametrize("method", ["draft_model", "hybrid"])
def test_rejection_sampling_with_the_drafts_probabilities_is_lossless(models, method, monkeypatch):
    """Drafts are accepted as min(p, q) allows. And a control: drafts that claim to come from another distribution."""
    from sam.vllm.trained import passes

    drawn_drafts = passes.drawn_drafts

    def wrong(*arguments):
        choose = drawn_drafts(*arguments)

        def choose_wrong(logits, pass_):
            found = choose(logits, pass_)
            return found._replace(probabilities=torch.full_like(found.probabilities, 1.0 / VOCABULARY))

        return choose_wrong

    with started(models, method, "rejection") as engine:
        greedy, drawn = (ask(engine, how, 100, 100) for how in ("greedy", "probabilistic"))
        if method == "draft_model":
            monkeypatch.setattr(passes, "drawn_drafts", wrong)
            assert p_value(models, ask(engine, "probabilistic", 100, 100)) < LIMIT
    assert drawn.accepted > 1.2 * greedy.accepted
    assert p_value(models, drawn) > LIMIT


@pytest.mark.statistical
def test_it_is_lossless_under_asynchronous_scheduling(models, asynchronous):
    """There the host does not know the drafts when they are verified."""
    with started(models, "draft_model", "rejection", async_scheduling=True) as engine:
        drawn = ask(engine, "probabilistic", 100, 100)
    assert drawn.accepted > 5000
    assert p_value(models, drawn) > LIMIT


def p_value(models, drawn) -> float:
    """Of a chi-square over each token's place in the target's distribution."""
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
    assert len(values) == 83 * 100
    return float(stats.chisquare(seen).pvalue)
