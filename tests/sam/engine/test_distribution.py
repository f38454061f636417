"""A real engine's tokens against the model's teacher-forced distribution, by their place in the verify step.

Every token gives a number that is uniform if it was drawn from the processed distribution: the mass of the likelier
tokens, and a random part of its own. Chi-square over these, for the first, the second and later tokens of a step; and
over all tokens where drafts are themselves drawn, from a draft model's distribution.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from sam.verify.exact import uniforms
from sam.vllm import exact_sampler
from tests.sam.engine import tiny_engine
from tests.sam.engine.tiny_engine import Engine, save_model
from tests.sam.engine.trained_models import save_draft_model

pytestmark = [pytest.mark.engine, pytest.mark.statistical]

RESPONSES, LENGTH = 1000, 200
VOCABULARY = 12  # so small that a draft is accepted often although nothing is certain
PLACES = ("first", "second", "later")
LIMIT = 1e-4  # p-value below which two distributions count as different
CONSTRAINTS = [{}, {"temperature": 0.3}, {"temperature": 1.2}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.9}]


@torch.no_grad()
def uniform_if_lossless(model, prompt, tokens, settings, chance) -> np.ndarray:
    """[tokens]; NaN where rounding decides whether top-p keeps a token, 2 for an impossible token."""
    logits = model.network(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].double()
    ordered, order = (logits / settings.get("temperature", 1.0)).sort(-1, descending=True)
    ordered[:, settings.get("top_k", ordered.shape[1]) :] = -torch.inf
    p = ordered.softmax(-1)
    before, top_p = p.cumsum(-1) - p, settings.get("top_p", 1.0)
    p = torch.where((before < top_p) & (p > 0), p, 0.0)
    uncertain = ((before - top_p).abs() < 1e-5).any(-1) & (top_p < 1.0)
    rank = (order == torch.tensor(tokens)[:, None]).int().argmax(-1, keepdim=True)
    own = p.gather(1, rank).squeeze(1)
    value = (before.gather(1, rank).squeeze(1) + torch.from_numpy(chance.random(len(tokens))) * own) / p.sum(-1)
    return torch.where(uncertain, torch.nan, torch.where(own > 0, value, 2.0)).numpy()


def p_value(values, bins=50) -> float:
    """Of a chi-square against the uniform distribution; 0 with an impossible token."""
    values = values[~np.isnan(values)]
    assert len(values) > 1000
    return stats.chisquare(np.histogram(values, bins, (0.0, 1.0))[0]).pvalue if (values <= 1.0).all() else 0.0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), sharpness=3.0, vocabulary=VOCABULARY)


def p_values(model, responses=RESPONSES, verification="exact", batch_invariant="auto") -> dict[str, float]:
    """By each token's place in its verify step; where nothing is drafted it is the first."""
    prompts = np.tile(np.random.default_rng(0).integers(0, VOCABULARY, (responses, 4)), 2)
    seeds = range(responses) if verification == "exact" else [None] * responses
    settings = [
        {"max_tokens": LENGTH, "seed": seed, **CONSTRAINTS[row % len(CONSTRAINTS)]} for row, seed in enumerate(seeds)
    ]
    places: list[list[int]] = [[] for _ in range(responses)]
    speculation = {"verification": verification, "batch_invariant": batch_invariant}
    with Engine(model, "ngram", 200, speculation=speculation) as engine:
        runner, sample = engine.runner, engine.runner._sample

        def watched(*arguments):
            output = sample(*arguments)
            kept = (output.sampled_token_ids != -1).sum(1).tolist()
            for row, request_id in enumerate(runner.input_batch.req_ids):
                if not runner.discard_request_mask.np[row]:
                    places[int(request_id.split("-")[0])].extend(range(kept[row]))
            return output

        runner._sample = watched
        result = engine.generate(prompts.tolist(), settings, logprobs=None)
    assert result.accepted > 10 * responses
    assert sum(map(len, result.tokens)) == responses * LENGTH
    chance, place = np.random.default_rng(1), np.array([row[:LENGTH] for row in places])
    rows = zip(prompts, result.tokens, settings, strict=True)
    values = np.array([uniform_if_lossless(model, *row, chance) for row in rows])
    return {name: p_value(values[place.clip(max=2) == number]) for number, name in enumerate(PLACES)}


# Which token it is may depend on the batch without batch-invariant kernels; how often it is drawn does not.
@pytest.mark.parametrize(("verification", "batch_invariant"), [("exact", "off"), ("rejection", "auto")])
def test_tokens_follow_the_model(model, verification, batch_invariant):
    found = p_values(model, verification=verification, batch_invariant=batch_invariant)
    assert min(found.values()) > LIMIT, found


def test_control_one_uniform_for_a_whole_step_is_caught(model, monkeypatch):
    def shared(keys, positions):
        _, first, request = np.unique(keys, return_index=True, return_inverse=True)
        return uniforms(keys, positions[first][request])

    monkeypatch.setattr(exact_sampler, "uniforms", shared)
    found = p_values(model, 200)
    assert found["first"] > LIMIT and found["second"] < 1e-12, found


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


def with_drawn_drafts(models, verification, asynchronous=False) -> Engine:
    target, draft = models
    speculation = {"draft_model": draft.path, "policy": "always", "verification": verification}
    return Engine(target, "draft_model", asynchronous=asynchronous, speculation=speculation)


def ask(models, engine, how):
    """Responses of 100 tokens at temperature 1, every sixth greedy, whose drafts are greedy or drawn; with a p-value of
    the others."""
    prompts = np.random.default_rng(0).integers(0, tiny_engine.VOCABULARY, (100, 6)).tolist()
    settings = [{"max_tokens": 100, "seed": row, "temperature": float(row % 6 != 0)} for row in range(100)]
    drafter = engine.runner.drafter
    drafter.config = replace(drafter.config, draft_sample_method=how)
    found = engine.generate(prompts, settings)
    assert drafter.counters["draft_model_errors"] == drafter.counters["draft_errors"] == 0
    rows, chance = zip(prompts, found.tokens, settings, strict=True), np.random.default_rng(1)
    values = [uniform_if_lossless(models[0], *row, chance) for row in rows if row[2]["temperature"]]
    found.p_value = p_value(np.concatenate(values), bins=40)
    return found


def test_drawn_drafts_are_accepted_more_often_by_exact_verification(models):
    with with_drawn_drafts(models, "exact") as engine:
        greedy, drawn = (ask(models, engine, how) for how in ("greedy", "probabilistic"))
    assert drawn.tokens == greedy.tokens and drawn.accepted > 1.2 * greedy.accepted > 100


def test_rejection_sampling_with_the_drafts_probabilities_is_lossless(models, asynchronous, monkeypatch):
    """Drafts are accepted as min(p, q) allows; the host does not know them when they are verified. And a control:
    drafts that claim to come from another distribution."""
    with with_drawn_drafts(models, "rejection", asynchronous=True) as engine:
        greedy, drawn = (ask(models, engine, how) for how in ("greedy", "probabilistic"))
        assert drawn.accepted > max(5000, 1.2 * greedy.accepted) and min(drawn.p_value, greedy.p_value) > LIMIT
        probabilities = engine.runner._get_spec_decode_draft_probs

        def wrong(metadata):
            found = probabilities(metadata)
            return found if found is None else torch.full_like(found, 1.0 / tiny_engine.VOCABULARY)

        monkeypatch.setattr(engine.runner, "_get_spec_decode_draft_probs", wrong)
        assert ask(models, engine, "probabilistic").p_value < LIMIT
