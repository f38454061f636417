"""Two tensor-parallel ranks: stock vLLM's tokens, by drafts that the first rank sends."""

import os
from pathlib import Path

import pytest

from tests.sam.engine import matrix
from tests.v2.engines import counters_of, engine
from tests.v2.second_on_cpu import ON_IMPORT

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]


def test_two_ranks_draft_the_same_and_give_stock_vllms_tokens(model, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(ON_IMPORT)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    rows = (91, 95, 100, 101, 110)
    with engine(model, ranks=2) as own:
        stock = matrix.run(own, rows)
    with engine(model, "sam", ranks=2) as own:
        matrix.assert_same(matrix.run(own, rows), stock, rows, by=1e-4)
        first, second = own.llm.collective_rpc(counters_of)
        assert own.count()["accepted"] > 2
    assert first["draft_errors"] == 0 and first["tracked_requests"] == len(rows)
    assert second["tracked_requests"] == 0
