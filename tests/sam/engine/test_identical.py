"""A thousand long responses: the same tokens with sam, with ngram and without speculation, in batches of any size."""

import numpy as np
import pytest

from tests.sam.engine.tiny_engine import NGRAM, SAM, VOCABULARY, generate, save_model

pytestmark = pytest.mark.engine

RESPONSES, LENGTH, PROMPTS = 1000, 200, 125


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"))


def run(model, speculative_config, batch):
    generator = np.random.default_rng(0)
    prompts = [generator.integers(0, VOCABULARY, 4 + row % 20).tolist() for row in range(PROMPTS)]
    settings = [{"max_tokens": LENGTH, "seed": row, "temperature": 1.0} for row in range(RESPONSES)]
    every = [prompts[row % PROMPTS] for row in range(RESPONSES)]
    return generate(model, every, settings, speculative_config, batch, logprobs=None)


@pytest.fixture(scope="module")
def off(model):
    return run(model, None, 256)


@pytest.mark.parametrize(("speculative_config", "batch"), [(SAM, 100), (NGRAM, 37)], ids=["sam-100", "ngram-37"])
def test_every_response_is_identical(model, off, speculative_config, batch, capfd):
    on = run(model, speculative_config, batch)
    identical = sum(a == b for a, b in zip(on.tokens, off.tokens, strict=True))
    with capfd.disabled():
        print(f" {identical} of {RESPONSES} responses of {LENGTH} tokens identical, {on.accepted} drafts accepted")
    assert min(map(len, off.tokens)) == LENGTH
    assert on.accepted > 0.1 * on.drafted > 1000
    assert len({tuple(tokens) for tokens in off.tokens}) == RESPONSES
    assert identical == RESPONSES
