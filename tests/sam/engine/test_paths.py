"""Further paths as rows of the batch, in a real vLLM engine on CPU: the same tokens, and more of them a step.

The matrix's requests under further paths are in test_matrix.py.
"""

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.step_cost import linear
from sam.vllm.paths.rows import PathRows
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, Engine, save_model

pytestmark = pytest.mark.engine

PATHS, REQUESTS, LENGTH = 4, 8, 100


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)


def prompts() -> list[list[int]]:
    """Two groups of four."""
    generator = np.random.default_rng(0)
    each = [generator.integers(0, VOCABULARY, 9).tolist() * 2 for _ in range(2)]
    return [each[row // 4] for row in range(REQUESTS)]


def started(model, paths=1, method=SAM, **speculation):
    """Many free rows; paths cross from one small block to the next."""
    return Engine(model, method, speculation={"paths": paths, **speculation}, block_size=16)


def ask(engine):
    """REQUESTS requests of LENGTH tokens, and what the drafter counted."""
    settings = [{"max_tokens": LENGTH, "seed": row, "temperature": 0.5 * (row % 3)} for row in range(REQUESTS)]
    counters = getattr(engine.runner.drafter, "counters", {}) if hasattr(engine.runner, "drafter") else {}
    before = dict(counters)
    result = engine.generate(prompts(), settings)
    result.counters = {name: value - before.get(name, 0) for name, value in counters.items()}
    return result


@pytest.fixture(scope="module")
def off(model):
    with started(model, method=None) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def one_path(model):
    with started(model) as engine:
        return ask(engine)


@pytest.fixture(scope="module")
def engine(model, off, one_path):
    """With further paths, for all tests: started when those before have ended."""
    with started(model, PATHS) as engine:
        yield engine


def assert_same(one, other):
    assert one.tokens == other.tokens and one.logprobs == other.logprobs


def test_more_tokens_are_accepted_and_none_is_changed(engine, off, one_path):
    found = ask(engine)
    assert_same(found, off)
    assert found.accepted > one_path.accepted > 50
    assert found.counters["path_wins"] > 10 and found.counters["draft_errors"] == found.counters["path_errors"] == 0


@pytest.mark.parametrize("left_out", ["_take_blocks", "_copy_begun"])
def test_blocks_that_are_not_handed_over_or_begun_would_be_seen(engine, off, left_out, monkeypatch):
    """The request's own blocks then hold a path that its text did not take, or a row's do not begin as they do."""
    monkeypatch.setattr(PathRows, left_out, lambda *_: None)
    assert ask(engine).tokens != off.tokens


def test_a_fault_in_a_row_costs_rows_and_changes_no_token(engine, off, one_path, monkeypatch):
    monkeypatch.setattr(PathRows, "_as_request", None)
    found = ask(engine)
    assert_same(found, off)
    assert found.counters["path_errors"] > 20 and found.counters["path_rows"] == 0
    assert found.accepted > 0.5 * one_path.accepted


def test_a_fault_in_planning_costs_drafts_and_changes_no_token(engine, off, monkeypatch):
    monkeypatch.setattr(engine.runner.sam_paths, "plan", None)
    found = ask(engine)
    assert_same(found, off)
    assert found.counters["draft_errors"] > 20 and found.accepted == 0


def test_goodput_prices_rows(engine, off, monkeypatch):
    """Where a token costs nothing rows are added, where it is dear few; goodput learns from the clock, too."""
    rows = {}
    for name, per_token in (("free", 1e-6), ("dear", 1.0)):
        policy = make_policy("goodput", 3, 0, step_cost=linear(5.0, 0.0, per_token), paths=PATHS)
        monkeypatch.setattr(engine.runner.drafter, "policy", policy)
        found = ask(engine)
        assert_same(found, off)
        rows[name] = found.counters["path_rows"]
    assert rows["free"] > max(10, 2 * rows["dear"]), rows
