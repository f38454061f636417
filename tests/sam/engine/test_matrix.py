"""The matrix of docs/lossless.md: {synchronous, asynchronous} x {sam, off} x {one, two tensor-parallel ranks}.

And the same requests with vLLM's ngram, with further paths as rows of the batch, with drafters that have a model, with
rejection sampling, and cut anywhere into requests of their own.
"""

import pytest

from tests.sam.engine import matrix
from tests.sam.engine.trained_models import save_draft_model, save_head

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("asynchronous", "ranks_environment")]
# Method, whether it is scheduled asynchronously, further settings, and tokens accepted at least. Trained drafters alone
# are in test_trained.py.
ENGINES = {
    "async off": ("off", True, {}, 0),
    "ngram": ("ngram", False, {}, 100),
    "sam": ("sam", False, {}, 200),
    "async sam": ("sam", True, {}, 200),
    "paths": ("sam", False, {"paths": 3}, 200),
    "async paths": ("sam", True, {"paths": 3}, 200),
    "rejection": ("sam", True, {"verification": "rejection"}, 200),
    "async draft model and sam": ("hybrid", True, {"draft_model": "draft"}, 100),
    "async head and sam": ("hybrid", True, {"draft_model": "head"}, 100),
}
SOME = range(80)  # requests that are enough for further runs of an engine


@pytest.fixture(scope="module")
def folders(model, tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in ("draft", "head")}
    save_draft_model(model, found["draft"])
    save_head(model, found["head"])
    return found


@pytest.fixture(scope="module")
def stock(model):
    """The answers of the synchronous engine without speculation."""
    with matrix.engine(model, "off", False) as engine:
        return matrix.run(engine)


@pytest.fixture(scope="module")
def off_with_two_ranks(model):
    with matrix.engine(model, "off", False, ranks=2) as engine:
        return matrix.run(engine)


def test_the_requests_end_in_every_way(stock):
    """The control of what follows: by length, by stop tokens, by stop strings, and some are aborted."""
    ended = set(range(matrix.REQUESTS)) - matrix.GONE
    whole = {row for row in ended if len(stock[row].tokens) == matrix.settings(row)["max_tokens"]}
    by_string = {row for row in ended - whole if matrix.has_stop_string(row)}
    assert min(map(len, (whole, by_string, ended - whole - by_string))) > 3
    assert all(len(stock[row].tokens) < matrix.settings(row)["max_tokens"] for row in matrix.GONE)


@pytest.mark.parametrize("name", ENGINES)
def test_one_rank(model, folders, stock, name):
    method, is_asynchronous, drafter, accepted = ENGINES[name]
    if "draft_model" in drafter:
        drafter = {"draft_model": str(folders[drafter["draft_model"]]), "cross_prompt": False}
    with matrix.engine(model, method, is_asynchronous, drafter=drafter) as engine:
        answers = matrix.run(engine)
        if name == "rejection":  # draws other tokens, and computes other log-probabilities: greedy tokens are the same
            rows = [row for row in range(0, matrix.REQUESTS, 5) if row not in matrix.GONE]
            assert [answers[row].text or answers[row].tokens for row in rows] == [
                stock[row].text or stock[row].tokens for row in rows
            ]
        else:
            matrix.assert_same(answers, stock)
        found, counters = engine.count(), engine.counters()
        assert found["preemptions"] > 10 and (found["accepted"] > accepted or method == "off")
        assert not any(value for counter, value in counters.items() if counter.endswith("_errors"))
        if "paths" in name:
            assert counters["path_rows"] > 300 and counters["path_wins"] > 5
        if method == "hybrid":
            assert counters["draft_model_passes"] > 50 and counters["draft_model_invalid_drafts"] == 0
        if name in ("async off", "sam", "async sam"):
            matrix.assert_same(matrix.run(engine, cuts := matrix.cuts(), cuts), stock, cuts, by=1e-4)
        if name == "async sam":
            matrix.run(engine, [0])  # those that have ended or were aborted are released by the next step
            assert len(engine.runner.drafter.session.texts) <= 1


@pytest.mark.parametrize(("is_asynchronous", "paths"), [(False, 1), (True, 3)], ids=["", "async paths"])
def test_two_ranks(model, off_with_two_ranks, is_asynchronous, paths):
    with matrix.engine(model, "sam", is_asynchronous, ranks=2, drafter={"paths": paths}) as engine:
        engine.llm.collective_rpc("prepare")
        matrix.assert_same(matrix.run(engine), off_with_two_ranks)
        assert engine.count()["accepted"] > 100
        (first, _), (second, _) = engine.llm.collective_rpc("take")
    assert first["tracked_requests"] > 100 and second["tracked_requests"] == 0
    assert not any(value for one in (first, second) for name, value in one.items() if name.endswith("_errors"))
    assert paths == 1 or (first["path_rows"] > 300 and first["path_wins"] > 5)


def test_two_ranks_scheduled_asynchronously(model, off_with_two_ranks):
    """One rank drafts, the other is given its drafts, by a message in the steps that have room for some; and none waits
    where nothing is drafted, once the scheduler knows."""
    cases = ("at times", 0, range(matrix.REQUESTS)), ("always", 1, SOME), ("never", 1, SOME), ("never", 1, SOME)
    with matrix.engine(model, "sam", True, ranks=2) as engine:
        engine.llm.collective_rpc("prepare")
        for number, (when, slow_rank, rows) in enumerate((*cases, ("broken", 0, SOME))):
            engine.llm.collective_rpc("draft", args=(when, slow_rank))
            matrix.assert_same(matrix.run(engine, rows), off_with_two_ranks, rows)
            assert engine.count()["accepted"] > len(rows) // 2 or when in ("never", "broken")
            (first, steps), (second, other_steps) = engine.llm.collective_rpc("take")
            assert first["tracked_requests"] > 100
            assert second["tracked_requests"] == second["draft_errors"] == 0
            assert (first["draft_errors"] > 50) == (when == "broken")
            for one in (steps, other_steps):
                assert one["messages"] == one["room"] and one["waits"] <= one["steps"] > 50
            if number == 3:
                assert steps["room"] == steps["waits"] == other_steps["waits"] == 0
