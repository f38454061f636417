"""A real engine's tokens against the model's teacher-forced distribution, by their place in the verify step.

Every token gives a number that is uniform if it was drawn from the processed distribution: the mass of the likelier
tokens, and a random part of its own. Chi-square over these, for the first, the second and later tokens of a step.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from sam import verify
from sam.verify.exact import uniforms
from sam.vllm import exact_sampler
from tests.sam.engine.tiny_engine import NGRAM, generate, save_model

pytestmark = [pytest.mark.engine, pytest.mark.statistical]

RESPONSES, LENGTH, PROMPT_LENGTH = 1000, 200, 8
VOCABULARY = 12  # so small that a draft is accepted often although nothing is certain
BINS = 50
PLACES = ("first", "second", "later")
LIMIT = 1e-4  # p-value below which two distributions count as different
CONSTRAINTS = [{}, {"temperature": 0.3}, {"temperature": 1.2}, {"top_k": 4, "temperature": 0.7}, {"top_p": 0.9}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), sharpness=3.0, vocabulary=VOCABULARY)


def run(model, responses=RESPONSES, verification="exact", observe=None, seeds=True, batch_invariant="auto"):
    """Tokens [responses, LENGTH] and each token's place in its verify step, 0 where nothing is drafted."""
    generator = np.random.default_rng(0)
    prompts = np.tile(generator.integers(0, VOCABULARY, (responses, PROMPT_LENGTH // 2)), 2)
    settings = [
        {"max_tokens": LENGTH, "seed": row if seeds else None, **CONSTRAINTS[row % len(CONSTRAINTS)]}
        for row in range(responses)
    ]
    places: list[list[int]] = [[] for _ in range(responses)]

    def watch(runner):
        if observe:
            observe(runner)
        sample = runner._sample

        def watched(*arguments):
            output = sample(*arguments)
            kept = (output.sampled_token_ids != -1).sum(1).tolist()
            for row, request_id in enumerate(runner.input_batch.req_ids):
                if not runner.discard_request_mask.np[row]:
                    places[int(request_id.split("-")[0])].extend(range(kept[row]))
            return output

        runner._sample = watched

    options = {"observe": watch, "logprobs": None, "batch_invariant": batch_invariant}
    result = generate(model, prompts.tolist(), settings, NGRAM, 200, verification, **options)
    assert result.accepted > 10 * responses
    return SimpleNamespace(
        prompts=torch.from_numpy(prompts),
        tokens=torch.tensor(result.tokens),
        places=np.array([row[:LENGTH] for row in places]),
        settings=settings,
    )


def uniform_if_lossless(model, record) -> np.ndarray:
    """[responses, LENGTH]; NaN where rounding decides whether top-p keeps a token, 2 for an impossible token."""
    noise = torch.rand(record.tokens.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    values = []
    for row, settings in enumerate(record.settings):
        sequence = torch.cat((record.prompts[row], record.tokens[row]))[None]
        with torch.no_grad():
            logits = model.network(sequence).logits[0, PROMPT_LENGTH - 1 : -1].double()
        logits /= settings.get("temperature", 1.0)
        ordered, order = logits.sort(-1, descending=True)
        ordered[:, settings.get("top_k", VOCABULARY) :] = -torch.inf
        p = ordered.softmax(-1)
        before = p.cumsum(-1) - p
        top_p = settings.get("top_p", 1.0)
        p = torch.where((before < top_p) & (p > 0), p, 0.0)
        uncertain = ((before - top_p).abs() < 1e-5).any(-1) & (top_p < 1.0)
        rank = (order == record.tokens[row][:, None]).int().argmax(-1, keepdim=True)
        own = p.gather(1, rank).squeeze(1)
        value = (before.gather(1, rank).squeeze(1) + noise[row] * own) / p.sum(-1)
        value = torch.where(own > 0, value, 2.0)
        values.append(torch.where(uncertain, torch.nan, value).numpy())
    return np.array(values)


def p_values(model, record) -> dict[str, float]:
    values = uniform_if_lossless(model, record)
    found = {}
    for place, name in enumerate(PLACES):
        here = record.places == place if name != "later" else record.places >= place
        sample = values[here & ~np.isnan(values)]
        assert len(sample) > 1000
        counts, _ = np.histogram(sample, BINS, (0.0, 1.0))
        found[name] = float(stats.chisquare(counts).pvalue) if (sample <= 1.0).all() else 0.0
    return found


# Which token it is may depend on the batch without batch-invariant kernels; how often it is drawn does not.
@pytest.mark.parametrize(("verification", "batch_invariant"), [("exact", "off"), ("rejection", "auto")])
def test_tokens_follow_the_model(model, verification, batch_invariant):
    record = run(model, verification=verification, seeds=verification == "exact", batch_invariant=batch_invariant)
    assert record.tokens.numel() == 200_000
    found = p_values(model, record)
    assert min(found.values()) > LIMIT, found


def test_control_one_uniform_for_a_whole_step_is_caught(model, monkeypatch):
    def shared(keys, positions):
        _, first, request = np.unique(keys, return_index=True, return_inverse=True)
        return uniforms(keys, positions[first][request])

    monkeypatch.setattr(exact_sampler, "uniforms", shared)
    found = p_values(model, run(model, 200))
    assert found["first"] > LIMIT and found["second"] < 1e-12, found


def test_control_a_rule_that_favours_drafts_is_caught(model, monkeypatch):
    def observe(runner):
        from vllm.v1.sample import rejection_sampler

        def rejection_sample(drafts, *arguments, **keywords):
            *others, logits, bonus, metadata = arguments
            logits[torch.arange(len(drafts)), drafts.long()] += 0.5
            return verify.rejection_sample(drafts, *others, logits, bonus, metadata, **keywords)

        monkeypatch.setattr(rejection_sampler, "rejection_sample", rejection_sample)

    found = p_values(model, run(model, 500, "rejection", observe, seeds=False))
    assert min(found.values()) < 1e-12, found
