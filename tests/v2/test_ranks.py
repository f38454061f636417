"""Two tensor-parallel ranks: stock vLLM's tokens, by drafts that the first rank sends."""

import os
from pathlib import Path

import pytest

from tests.sam.engine import matrix
from tests.v2.engines import counters_of, engine
from tests.v2.second_on_cpu import DRAFTING_ON_IMPORT, ON_IMPORT

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]


ROWS = (91, 95, 100, 101, 110)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Says what each rank that is started runs before it imports vLLM."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(REPOSITORY)]))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        yield (folder / "sitecustomize.py").write_text


@pytest.fixture(scope="module")
def stock(model, ranks):
    ranks(ON_IMPORT)
    with engine(model, ranks=2) as own:
        return matrix.run(own, ROWS)


def place_of_drafts(worker) -> str:
    return worker.model_runner.speculator.on


def drafts_like_one(own, stock) -> list[dict[str, int]]:
    """Counters of the ranks, of which the first follows all requests."""
    matrix.assert_same(matrix.run(own, ROWS), stock, ROWS, by=1e-4)
    assert own.count()["accepted"] > 2
    first, second = own.llm.collective_rpc(counters_of)
    assert first["draft_errors"] == second["tracked_requests"] == 0 and first["tracked_requests"] == len(ROWS)
    return [first, second]


def test_two_ranks_draft_the_same_and_give_stock_vllms_tokens(model, stock, ranks):
    ranks(ON_IMPORT)
    with engine(model, "sam", ranks=2) as own:
        drafts_like_one(own, stock)


def test_two_ranks_verify_what_the_device_of_the_first_drafts(model, stock, ranks):
    ranks(DRAFTING_ON_IMPORT)
    on_device = {"draft_on": "auto", "memory_budget_mib": 1}
    with engine(model, "sam", on_device, asynchronous=True, ranks=2) as own:
        assert own.llm.collective_rpc(place_of_drafts) == ["the device"] * 2
        assert drafts_like_one(own, stock)[0]["waited_steps"] == 0
