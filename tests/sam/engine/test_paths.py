"""Further paths as rows of the batch, with many free rows: whose they are, and faults. That they win and change no
token is in test_matrix.py."""

import pytest

from sam.vllm.paths.rows import PathRows
from tests.sam.engine.tiny_engine import PROMPTS, SETTINGS, Engine, assert_same

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(model, off):
    """Paths cross from one small block to the next."""
    with Engine(model, "sam", speculation={"paths": 4}, block_size=16) as engine:
        yield engine


@pytest.mark.parametrize("more", [{}, {"repetition_penalty": 1.1}, {"min_tokens": 3}, {"bad_words": ["w7"]}], ids=str)
def test_requests_whose_tokens_depend_on_more_than_their_text_have_no_rows(engine, more):
    found = engine.generate(PROMPTS[-4:], [own | more for own in SETTINGS[-4:]])
    assert bool(found.counters["path_rows"]) == (not more) and found.drafted > found.counters["path_errors"] == 0


def test_a_fault_in_a_row_or_in_planning_changes_no_token(engine, off, monkeypatch):
    """The first costs rows, the second drafts."""
    found = engine.generate()
    assert_same(found, off)
    assert found.counters["path_wins"] > 10 and found.counters["path_errors"] == 0
    monkeypatch.setattr(PathRows, "_as_request", None)
    found = engine.generate()
    assert_same(found, off)
    assert found.counters["path_errors"] > 20 and found.counters["path_rows"] == 0 and found.accepted > 50
    monkeypatch.setattr(engine.runner.sam_paths, "plan", None)
    found = engine.generate()
    assert_same(found, off)
    assert found.counters["draft_errors"] > 20 and found.accepted == 0
