"""Further paths as rows of the batch, in a real vLLM engine on CPU: the same tokens, and more of them a step.

The matrix's requests under further paths are in test_matrix.py.
"""

import pytest

from sam.switch.policies import make_policy
from sam.switch.step_cost import linear
from sam.vllm.paths.rows import PathRows
from tests.sam.engine.tiny_engine import Engine, assert_same

pytestmark = pytest.mark.engine

PATHS = 4


@pytest.fixture(scope="module")
def engine(model, off):
    """Many free rows; paths cross from one small block to the next."""
    with Engine(model, "sam", speculation={"paths": PATHS}, block_size=16) as engine:
        yield engine


def ask(engine, off):
    """What came out, which is what it is without speculation."""
    found = engine.generate()
    assert_same(found, off)
    return found


def test_further_paths_win_and_no_token_is_changed(engine, off):
    found = ask(engine, off)
    assert found.counters["path_wins"] > 10
    assert found.accepted > 50 and found.counters["draft_errors"] == found.counters["path_errors"] == 0


def test_a_fault_in_a_row_or_in_planning_changes_no_token(engine, off, monkeypatch):
    """The first costs rows, the second drafts."""
    monkeypatch.setattr(PathRows, "_as_request", None)
    found = ask(engine, off)
    assert found.counters["path_errors"] > 20 and found.counters["path_rows"] == 0 and found.accepted > 50
    monkeypatch.setattr(engine.runner.sam_paths, "plan", None)
    found = ask(engine, off)
    assert found.counters["draft_errors"] > 20 and found.accepted == 0


def test_goodput_prices_rows(engine, off, monkeypatch):
    """Where a token costs nothing rows are added, where it is dear few; goodput learns from the clock, too."""
    rows = {}
    for name, per_token in (("free", 1e-6), ("dear", 20.0)):
        policy = make_policy("goodput", 3, 0, step_cost=linear(5.0, 0.0, per_token), paths=PATHS)
        monkeypatch.setattr(engine.runner.drafter, "policy", policy)
        rows[name] = ask(engine, off).counters["path_rows"]
    assert rows["free"] > max(10, 2 * rows["dear"]), rows
