"""Trained drafters on two tensor-parallel ranks: the same tokens, the same passes on both, faults of both."""

import contextlib
import time

import pytest

from sam.config import SpeculationConfig
from tests.sam.engine import matrix
from tests.sam.engine.draft_model_runs import SMALL, K, again, save_draft_model
from tests.sam.engine.eagle_head import save_head
from tests.sam.engine.tiny_engine import save_model

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("ranks_environment")]
ALWAYS, PAUSED, NEVER = tuple(range(10)), (3, 4, 9), ()
# Of an engine's own policy, until another is put in: goodput's passes are timed at start-up, by both ranks.
POLICIES = {
    "draft_model": {"policy": "goodput"},
    "hybrid": {"policy": "threshold", "batch_size_threshold": 1},
    "eagle3": {"policy": "always"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    target = save_model(tmp_path_factory.mktemp("model"), sharpness=12.0)
    draft, head = (tmp_path_factory.mktemp(name) for name in ("draft", "head"))
    save_draft_model(target, draft)
    save_head(target, head)
    return {"target": target, "draft_model": draft, "hybrid": draft, "eagle3": head}


@contextlib.contextmanager
def engine(folders, method, ranks=2, **settings):
    drafter = {} if method == "off" else {"draft_model": str(folders[method]), "cross_prompt": False}
    config = SpeculationConfig(method=method, num_speculative_tokens=K, **{"policy": "always", **drafter, **settings})
    with matrix.started(
        model=folders["target"].path, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=64, dtype="float32",
        enforce_eager=True, seed=0, tensor_parallel_size=ranks,
        distributed_executor_backend="mp" if ranks > 1 else "uni",
        kv_cache_memory_bytes=64 << 20, async_scheduling=False, disable_log_stats=False,
        worker_extension_cls="tests.sam.engine.ranks.TrainedRanks", **SMALL, **config.vllm_arguments(),
    ) as llm:  # fmt: skip
        yield llm


@pytest.fixture(scope="module")
def off(folders):
    with engine(folders, "off") as llm:
        return again(llm)


def played(llm, pattern=None):
    """Tokens, and of each rank what it counted."""
    llm.collective_rpc("take")
    if pattern is not None:
        llm.collective_rpc("draft", args=(pattern,))
    tokens = again(llm)
    return tokens, llm.collective_rpc("take")


@pytest.mark.parametrize("method", POLICIES)
def test_identical_tokens_and_the_same_passes_on_both_ranks(folders, off, share_on_one_rank, method, monkeypatch):
    """Whoever's clock decides: the first rank's does."""
    if method == "eagle3":
        monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")  # as in rollouts
    with engine(folders, method, **POLICIES[method]) as llm:
        llm.collective_rpc("prepare")
        tokens, ((before, first), (_, second)) = played(llm)
        assert tokens == off and first == second
        assert method != "hybrid" or first["messages"] < first["steps"] / 2, "few in a switched-off phase"
        for pattern in (ALWAYS, PAUSED):
            tokens, ((counters, first), (others, second)) = played(llm, pattern)
            assert tokens == off
            assert first == second and first["passes"] > 5 and first["messages"] == first["steps"]
            assert counters["draft_errors"] == counters["draft_model_errors"] == others["draft_model_errors"] == 0
            assert counters["draft_model_invalid_drafts"] == 0
            if method == "draft_model" and pattern == ALWAYS:  # as many drafts are accepted as on one rank
                share = accepted_share(counters, before)
                assert share > 0.05 and share == pytest.approx(share_on_one_rank, rel=0.1)
        tokens, ((_, first), (_, second)) = played(llm, NEVER)
        assert tokens == off and first == second and "passes" not in first

        llm.collective_rpc("break_passes")
        tokens, ((counters, _), (others, _)) = played(llm, ALWAYS)
        assert tokens == off and counters["draft_errors"] == 0
        assert counters["draft_model_errors"] == others["draft_model_errors"]
        assert counters["draft_model_errors"] >= 1  # after eight it rests
        if method == "eagle3":
            llm.collective_rpc("mend_passes")
            check_end_where_one_rank_fails_alone(llm)


def check_end_where_one_rank_fails_alone(llm) -> None:
    """The other rank waits in a collective that nothing ends; vLLM's own time limit of a step is five minutes."""
    from vllm.v1.engine.exceptions import EngineDeadError

    llm.collective_rpc("break_one", args=(2.0,))
    began = time.monotonic()
    with pytest.raises(EngineDeadError):
        again(llm)
    assert time.monotonic() - began < 120


@pytest.fixture(scope="module")
def share_on_one_rank(folders):
    with engine(folders, "draft_model", ranks=1) as llm:
        llm.collective_rpc("prepare")
        _, ((counters, _),) = played(llm, ALWAYS)
        return accepted_share(counters)


def accepted_share(counters, before=None) -> float:
    accepted, drafted = (
        counters[name] - (before or {}).get(name, 0)
        for name in ("draft_model_accepted_tokens", "draft_model_drafted_tokens")
    )
    return accepted / drafted
