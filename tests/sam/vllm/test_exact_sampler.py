"""Exact verification in a real vLLM engine on CPU: the same tokens and log-probabilities, whatever is drafted."""

import numpy as np
import pytest
import torch

from sam.verify.exact import rng_key, uniforms
from tests.sam.engine.tiny_engine import NGRAM, VOCABULARY, generate, save_model

pytestmark = pytest.mark.engine

REQUESTS = 48
LENGTH, LEAST = 60, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, VOCABULARY, 5 + row % 7).tolist() * 2 for row in range(REQUESTS)]


def run(model, speculative_config=None, batch=64, sampling=None, seeds=True, **engine):
    """REQUESTS requests of LENGTH tokens."""
    settings = [
        {"max_tokens": LENGTH, "seed": row if seeds else None, **(sampling(row) if sampling else {})}
        for row in range(REQUESTS)
    ]
    return generate(model, prompts(), settings, speculative_config, batch, **engine)


@pytest.fixture(scope="module")
def off(model):
    return run(model)


def test_tokens_are_the_keyed_draws_from_the_teacher_forced_distribution(model, off):
    """The engine's tokens against transformers' logits and uniforms; a rounding may move one draw in a thousand."""
    agree = total = 0
    for row, (prompt, tokens) in enumerate(zip(prompts(), off.tokens, strict=True)):
        with torch.no_grad():
            logits = model.network(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        probabilities = logits.double().softmax(-1).numpy()
        draws = uniforms(np.full(len(tokens), rng_key(row, 0, "")), len(prompt) + np.arange(len(tokens)))
        cumulative = probabilities.cumsum(-1)
        expected = [np.searchsorted(c, u * c[-1], side="right") for c, u in zip(cumulative, draws, strict=True)]
        agree += int((np.array(tokens) == expected).sum())
        total += len(tokens)
    assert total == REQUESTS * LENGTH and agree >= 0.999 * total


def mixed(row: int) -> dict:
    """What vLLM allows with speculation, alone and together, greedy rows among them."""
    return [
        {"temperature": 0.0},
        {"top_k": 5, "temperature": 0.7},
        {"top_p": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5},
        {"allowed_token_ids": list(range(100)), "frequency_penalty": 0.3},
        {"min_tokens": LEAST, "stop_token_ids": list(range(0, VOCABULARY, 4)), "ignore_eos": False},
        {"top_k": 20, "top_p": 0.9, "temperature": 1.3, "repetition_penalty": 1.1},
        {},
    ][row % 8]


def named(row: int) -> dict:
    """Log-probabilities of tokens by name, in two lengths."""
    return {"logprobs": None, "logprob_token_ids": [15, 16, 17][: 1 + row % 3]}


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [("processed_logprobs", mixed), ("raw_logits", mixed), ("raw_logprobs", named)],
    ids=["processed_logprobs", "raw_logits", "by name"],
)
def test_the_same_with_every_constraint_whatever_the_log_probabilities_are_of(model, mode, sampling):
    arguments = {"sampling": sampling, "logprobs_mode": mode}
    without, on = run(model, **arguments), run(model, NGRAM, 16, **arguments)
    assert on.accepted > 50
    assert on.tokens == without.tokens and on.entries == without.entries
    ends = {len(tokens) for tokens in without.tokens} - {LENGTH}
    assert sampling is named or LEAST < min(ends) < LEAST + 6, "some end as soon as they may"


def test_min_p_which_vllm_allows_without_drafts_only(model, off):
    """No token below 0.4 of the likeliest one's probability is drawn; without it some are."""

    def smallest_ratio(result):
        own, best = (np.concatenate(values) for values in (result.logprobs, result.best))
        return np.exp(own - best).min()

    constrained = run(model, sampling=lambda _: {"min_p": 0.4})
    assert smallest_ratio(constrained) >= 0.4 > smallest_ratio(off)


def test_keys_without_seeds_come_from_engine_and_request(model):
    one, other = run(model, seeds=False), run(model, seeds=False, seed=1)
    assert sum(a == b for a, b in zip(one.tokens, other.tokens, strict=True)) == 0
    assert len({tuple(tokens) for tokens in one.tokens}) == REQUESTS
