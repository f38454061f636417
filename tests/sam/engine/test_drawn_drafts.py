"""Drafts that are drawn from a draft model's distribution, in a real engine: accepted more often, and lossless. The
same tokens with exact verification are in test_matrix.py."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from tests.sam.engine.tiny_engine import VOCABULARY, Engine, save_model
from tests.sam.engine.trained_models import save_draft_model

pytestmark = [pytest.mark.engine, pytest.mark.statistical]

REQUESTS, TOKENS = 100, 100
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


def started(models, verification, **engine):
    target, draft = models
    speculative = {"method": "draft_model", "model": draft.path, "num_speculative_tokens": 3}
    speculative["disable_padded_drafter_batch"] = not engine.get("async_scheduling")
    speculation = {"method": "draft_model", "draft_model": draft.path, "policy": "always"}
    return Engine(target, speculative, verification=verification, speculation=speculation, **engine)


def ask(engine, how="probabilistic"):
    """All drawn at temperature 1 but for every sixth, which is greedy; drafts are greedy or drawn."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 6).tolist() for _ in range(REQUESTS)]
    settings = [{"max_tokens": TOKENS, "seed": row, "temperature": float(row % 6 != 0)} for row in range(REQUESTS)]
    drafter, counters = engine.runner.drafter, engine.runner.drafter.counters
    drafter.config = replace(drafter.config, draft_sample_method=how)
    found = engine.generate(prompts, settings)
    found.prompts = prompts
    assert counters["draft_model_errors"] == counters["draft_errors"] == 0
    return found


def test_more_of_them_are_accepted(models):
    with started(models, "exact") as engine:
        greedy, drawn = (ask(engine, how) for how in ("greedy", "probabilistic"))
    assert drawn.tokens == greedy.tokens and drawn.accepted > 1.2 * greedy.accepted > 100


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_rejection_sampling_with_the_drafts_probabilities_is_lossless(
    models, asynchronous, monkeypatch, is_asynchronous
):
    """Drafts are accepted as min(p, q) allows; asynchronously the host does not know them when they are verified. And a
    control: drafts that claim to come from another distribution."""
    from sam.vllm.trained import passes

    drawn_drafts = passes.drawn_drafts

    def wrong(*arguments):
        choose = drawn_drafts(*arguments)

        def choose_wrong(logits, pass_):
            found = choose(logits, pass_)
            return found._replace(probabilities=torch.full_like(found.probabilities, 1.0 / VOCABULARY))

        return choose_wrong

    with started(models, "rejection", async_scheduling=is_asynchronous) as engine:
        drawn = ask(engine)
        assert drawn.accepted > 5000 and p_value(models, drawn) > LIMIT
        if not is_asynchronous:
            assert drawn.accepted > 1.2 * ask(engine, "greedy").accepted
            monkeypatch.setattr(passes, "drawn_drafts", wrong)
            assert p_value(models, ask(engine)) < LIMIT


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
