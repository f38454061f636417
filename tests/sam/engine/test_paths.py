"""Further paths as rows of the batch, in a real vLLM engine on CPU: the same tokens, and more of them a step."""

import numpy as np
import pytest

from sam.vllm.paths.rows import PathRows
from tests.sam.engine import matrix
from tests.sam.engine.tiny_engine import SAM, VOCABULARY, generate

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]

PATHS = {"paths": 3}
REQUESTS, LENGTH = 8, 100


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return matrix.save(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("is_asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_matrix_with_further_paths(model, ranks, is_asynchronous):
    """Aborts, preemptions, stop strings, penalties, prompts in pieces: every token and log-probability."""
    with matrix.engine(model, "off", False, ranks=ranks) as llm:
        off = matrix.run(llm)
    with matrix.engine(model, "sam", is_asynchronous, ranks=ranks, drafter=PATHS) as llm:
        answers = matrix.run(llm)
        matrix.assert_same(answers, off)
        if ranks == 1:
            worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
            counters = worker.model_runner.drafter.counters
        else:
            llm.collective_rpc("prepare")
            counters = llm.collective_rpc("take")[0][0]
    assert counters["path_rows"] > 300 and counters["path_wins"] > 5
    assert counters["draft_errors"] == counters["path_errors"] == 0


def prompts() -> list[list[int]]:
    """Two groups of four."""
    generator = np.random.default_rng(0)
    each = [generator.integers(0, VOCABULARY, 9).tolist() * 2 for _ in range(2)]
    return [each[row // 4] for row in range(REQUESTS)]


def run(model, paths=1, method=SAM, observe=None, shape="auto", **engine):
    """REQUESTS requests of LENGTH tokens, with many free rows; paths cross from one small block to the next."""
    runners = []

    def watch(runner):
        runners.append(runner)
        if observe:
            observe(runner)

    settings = [{"max_tokens": LENGTH, "seed": row, "temperature": 0.5 * (row % 3)} for row in range(REQUESTS)]
    speculation = {"paths": paths, "draft_shape": shape}
    result = generate(
        model, prompts(), settings, method, speculation=speculation, observe=watch, block_size=16, **engine
    )
    result.counters = dict(getattr(getattr(runners[0], "drafter", None), "counters", {}))
    return result


@pytest.fixture(scope="module")
def off(model):
    return run(model, method=None)


@pytest.fixture(scope="module")
def one_path(model):
    return run(model)


def assert_same(one, other):
    assert one.tokens == other.tokens and one.logprobs == other.logprobs


@pytest.mark.parametrize("paths", [2, 4])
def test_more_tokens_are_accepted_and_none_is_changed(model, off, one_path, paths):
    found = run(model, paths)
    assert_same(found, off)
    assert found.accepted > one_path.accepted > 50
    assert found.counters["path_wins"] > 10 and found.counters["draft_errors"] == found.counters["path_errors"] == 0


def test_steps_of_one_shape(model, off):
    found = run(model, 3, shape="uniform")
    assert_same(found, off)
    assert found.counters["path_wins"] > 10 and found.counters["filled_draft_tokens"] > 0


def test_blocks_that_are_not_handed_over_would_be_seen(model, off, monkeypatch):
    """The request's own blocks then hold a path that its text did not take."""
    monkeypatch.setattr(PathRows, "_take_blocks", lambda *_: None)
    assert run(model, 4).tokens != off.tokens


def test_blocks_that_a_row_does_not_begin_with_would_be_seen(model, off, monkeypatch):
    monkeypatch.setattr(PathRows, "_copy_begun", lambda *_: None)
    assert run(model, 4).tokens != off.tokens


def test_a_fault_in_a_row_costs_rows_and_changes_no_token(model, off, one_path, monkeypatch):
    monkeypatch.setattr(PathRows, "_as_request", None)
    found = run(model, 4)
    assert_same(found, off)
    assert found.counters["path_errors"] > 20 and found.counters["path_rows"] == 0
    assert found.accepted > 0.5 * one_path.accepted


def test_a_fault_in_planning_costs_drafts_and_changes_no_token(model, off):
    def observe(runner):
        runner.sam_paths.plan = None

    found = run(model, 4, observe=observe)
    assert_same(found, off)
    assert found.counters["draft_errors"] > 20 and found.accepted == 0


def test_goodput_prices_rows(model, off, tmp_path):
    """Where a token costs nothing rows are added, where it is dear few; goodput learns from the clock, too."""
    from sam.switch.step_cost import linear

    rows = {}
    for name, per_token in (("free", 1e-6), ("dear", 1.0)):
        linear(5.0, 0.0, per_token).save(tmp_path / name)
        found = run(model, 4, policy="goodput", step_cost=str(tmp_path / name))
        assert_same(found, off)
        rows[name] = found.counters["path_rows"]
    assert rows["free"] > max(10, 2 * rows["dear"]), rows
