"""Two tensor-parallel ranks: stock vLLM's tokens, by drafts that the first rank sends."""

import os
from pathlib import Path

import pytest

from tests.v2.engines import answers, counters_of, engine, prompts

pytestmark = pytest.mark.engine

REPOSITORY = Path(__file__).parents[2]
# vLLM starts its ranks anew: they need what conftest.py does before anything of vLLM.
REPAIRS = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    import tests.v2.conftest
"""


@pytest.fixture
def repaired(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(REPAIRS)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(REPOSITORY)]))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def test_two_ranks_draft_the_same_and_give_stock_vllms_tokens(model, repaired):
    kinds = ({"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 30}, {"logprobs": 1})
    requests = [(f"row_{row}", prompts(2, 24)[row // 2], {"max_tokens": 24} | kind) for row, kind in enumerate(kinds)]
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, None, **ranks) as llm:
        stock = answers(llm, requests)
    with engine(model, "sam", **ranks) as llm:
        sam = answers(llm, requests)
        first, second = llm.collective_rpc(counters_of)
    assert sam.tokens == stock.tokens and len(sam.tokens) == 4
    assert sam.accepted > 2 and first["draft_errors"] == 0
    assert first["tracked_requests"] == 4 and second["tracked_requests"] == second["waited_steps"] == 0
