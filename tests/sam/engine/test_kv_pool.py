"""Two replicas with a KV pool between them, vLLM's MooncakeStoreConnector with a folder for its network.

Each is a process of its own with a real engine that drafts; the tokens are compared with one that has no pool and
drafts nothing.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.kv_pool import replica
from tests.sam.engine.tiny_engine import SAM, save_model

pytestmark = pytest.mark.engine

CHUNK, LENGTH = 32, 96
PROMPTS = [[1 + group, 7, 11 + group, 5, 3, 2 + group, 9, 9] * 5 for group in range(4) for _ in range(2)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Weights of two versions: `path` and `newer`."""
    made = save_model(tmp_path_factory.mktemp("model"))
    newer = tmp_path_factory.mktemp("newer")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in made.network.parameters():
            parameter.add_(0.1 * parameter.std() * torch.randn(parameter.shape, generator=generator))
    made.network.save_pretrained(newer)
    return SimpleNamespace(path=made.path, newer=str(newer))


def whole(salt=None):
    parameters = [{"seed": 100 + i, "max_tokens": LENGTH} for i in range(len(PROMPTS))]
    return {"prompts": PROMPTS, "parameters": parameters, "salt": salt}


def chunk(tokens, number, salt):
    """The chunk of that number of all responses, whose whole is `tokens`."""
    given = number * CHUNK
    extra = {"max_tokens": min(CHUNK, LENGTH - given)}
    prompts = [prompt + response[:given] for prompt, response in zip(PROMPTS, tokens, strict=True)]
    return {"prompts": prompts, "parameters": [{"seed": 100 + i, **extra} for i in range(len(PROMPTS))], "salt": salt}


@pytest.fixture(scope="module")
def without_pool(model):
    return replica.run(model.path, [whole(), {"weights": model.newer}, whole()])


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    return tmp_path_factory.mktemp("pool") / "values"


@pytest.fixture(scope="module")
def first(model, pool, without_pool):
    """Two chunks, a weight sync, and whole responses under the new version's salt."""
    tokens = without_pool[0]["tokens"]
    calls = [chunk(tokens, 0, "run/1"), chunk(tokens, 1, "run/1"), {"weights": model.newer}, whole("run/2")]
    return replica.run(model.path, calls, pool, speculative_config=SAM)


@pytest.fixture(scope="module")
def second(model, pool, without_pool, first):
    """Another replica, to which the third chunk moves."""
    calls = [chunk(without_pool[0]["tokens"], 2, "run/1")]
    return replica.run(model.path, calls, pool, speculative_config=SAM)


@pytest.fixture(scope="module")
def unsalted(model, pool, first):
    """A third one, which goes on with the old salt under the new weights."""
    return replica.run(model.path, [{"weights": model.newer}, whole("run/1")], pool, speculative_config=SAM)


def part(call, at):
    return {name: [values[at] for values in call[name]] for name in ("tokens", "logprobs")}


def test_a_chunk_that_moves_loads_what_it_would_have_read_again(without_pool, first, second):
    expected = without_pool[0]
    assert part(first[0], slice(None)) == part(expected, slice(0, 32))
    assert part(first[1], slice(None)) == part(expected, slice(32, 64))
    assert part(second[0], slice(None)) == part(expected, slice(64, 96))
    # All full blocks of prompt and first chunk, which were in the pool when the second chunk had started.
    assert second[0]["loaded"] == len(PROMPTS) * ((len(PROMPTS[0]) + CHUNK) // replica.BLOCK * replica.BLOCK)


def test_nothing_of_old_weights_is_read_under_the_new_version(without_pool, first):
    old, _, new = without_pool
    assert old["tokens"] != new["tokens"]
    assert first[3]["loaded"] == 0
    assert part(first[3], slice(None)) == part(new, slice(None))


def test_without_a_new_salt_it_is(without_pool, unsalted):
    """The control: a pool whose reset clears nothing, under one salt."""
    stale, new = unsalted[1], without_pool[2]
    assert stale["loaded"] > 0
    assert stale["logprobs"] != new["logprobs"]
    assert stale["tokens"] != new["tokens"]
