"""Exact verification: the same tokens and log-probabilities under every constraint, whatever is drafted."""

import numpy as np
import pytest

from tests.sam.engine.tiny_engine import VOCABULARY, Engine, assert_same, save_model

pytestmark = pytest.mark.engine

REQUESTS = 48
LENGTH, LEAST = 60, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


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


def allowed(row: int) -> dict:
    """Some may use few tokens, others come to their rows after them."""
    return {"allowed_token_ids": list(range(100)), "max_tokens": LENGTH - row} if row % 8 == 4 else {}


def named(row: int) -> dict:
    """Log-probabilities of tokens by name, in two lengths."""
    return {"logprobs": None, "logprob_token_ids": [15, 16, 17][: 1 + row % 3]}


def alone(row: int) -> dict:
    """Every third asks for the log-probabilities of the whole vocabulary, and nobody for anything else. Where it is
    cold most tokens have no probability that float32 can hold."""
    cold = {"temperature": 0.01} if row % 6 == 0 else {}
    return {"logprobs": VOCABULARY if row % 3 == 0 else 2} | cold


def beside(row: int) -> dict:
    """The same ones, beside tokens by name and beside a top-p."""
    return [alone(row), named(row), {"top_p": 0.5}][row % 3]


def ask(engine: Engine, sampling):
    """REQUESTS requests of LENGTH tokens, with settings of `sampling`."""
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 5 + row % 7).tolist() * 2 for row in range(REQUESTS)]
    return engine.generate(prompts, [{"max_tokens": LENGTH, "seed": row} | sampling(row) for row in range(REQUESTS)])


def smallest_ratio(result) -> float:
    """Of a drawn token's probability to the likeliest one's."""
    steps = zip(sum(result.tokens, []), sum(result.logprobs, []), strict=True)
    return min(np.exp(step[token] - max(step.values())) for token, step in steps)


def assert_as_asked(result, expected) -> None:
    """Every request of `beside` has what it asked for, `expected` being what `alone` brings."""
    for row, (tokens, steps) in enumerate(zip(result.tokens, result.logprobs, strict=True)):
        if row % 3 == 0:
            assert steps == expected.logprobs[row] and len(steps[0]) == VOCABULARY
        if row % 3 == 1:
            names = named(row)["logprob_token_ids"]
            assert [set(step) for step in steps] == [{token, *names} for token in tokens]


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logits"])
def test_the_same_with_every_constraint_whatever_the_log_probabilities_are_of(model, mode):
    arguments = {"logprobs_mode": mode, "max_logprobs": VOCABULARY}
    with Engine(model, **arguments) as engine:
        off = [ask(engine, sampling) for sampling in (mixed, allowed, named, beside)]
        assert_as_asked(off[-1], ask(engine, alone))
        if mode == "processed_logprobs":  # min-p, which vLLM allows without drafts only
            plain, constrained = (smallest_ratio(ask(engine, lambda _, p=p: {"min_p": p})) for p in (0.0, 0.4))
            assert constrained >= 0.4 > plain
    with Engine(model, "ngram", 16, **arguments) as engine:
        for sampling, without in zip((mixed, allowed, named, beside), off, strict=True):
            on = ask(engine, sampling)
            assert_same(on, without)
            assert on.accepted > 50
    ends = {len(tokens) for tokens in off[0].tokens} - {LENGTH}
    assert LEAST < min(ends) < LEAST + 6, "some end as soon as they may"
