"""The step costs that an engine measures when it starts."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import CUDAGraphMode
from vllm.distributed import parallel_state

from sam.vllm import warmup_cost


class Engine:
    """Its clock moves by what a forward pass takes."""

    def __init__(self, monkeypatch, seconds):
        self.now, self.passes, self._seconds = 0.0, [], seconds
        monkeypatch.setattr(warmup_cost.time, "perf_counter", lambda: self.now)

    def forward_pass(self, size):
        self.passes.append(size)
        self.now += self._seconds(size)


def test_a_fast_engine_measures_every_size_and_none_is_slower_than_a_larger_one(monkeypatch):
    """Passes of 24 tokens are held up whenever they are timed, and others now and then."""

    def seconds(size):
        own = 0.001 + 1e-5 * size
        return 10 * own if len(engine.passes) % 3 == 0 or size == 24 else own

    engine = Engine(monkeypatch, seconds)
    sizes, milliseconds = warmup_cost.measured(engine.forward_pass, 2304, lambda number: number)
    assert sizes.tolist() == [*warmup_cost.SIZES, 2304] and engine.now <= warmup_cost.BUDGET_SECONDS
    np.testing.assert_allclose(milliseconds, 1 + 0.01 * np.where(sizes == 24, 32, sizes))


@pytest.mark.parametrize("per_token", [0.001, 0.02])
def test_a_slow_engine_stops_within_the_budget(monkeypatch, per_token):
    engine = Engine(monkeypatch, lambda size: 10 * per_token + per_token * size)
    sizes, _ = warmup_cost.measured(engine.forward_pass, 2304, lambda number: number)
    assert 2 <= len(sizes) < len(warmup_cost.SIZES) and engine.now <= warmup_cost.BUDGET_SECONDS
    engine = Engine(monkeypatch, lambda size: 60.0)
    with pytest.raises(ValueError, match=r"a pass of few tokens takes 60\.0 s"):
        warmup_cost.measured(engine.forward_pass, 64, lambda number: number)


def test_every_rank_runs_the_passes_of_the_first(monkeypatch):
    slow, decisions = Engine(monkeypatch, lambda size: 0.02 * size), []
    warmup_cost.measured(slow.forward_pass, 2304, lambda number: decisions.append(number) or number)
    fast, agreed = Engine(monkeypatch, lambda size: 1e-6 * size), iter(decisions)
    warmup_cost.measured(fast.forward_pass, 2304, lambda number: next(agreed))
    assert fast.passes == slow.passes


class Runner(SimpleNamespace):
    """What a worker calls of a model runner while an engine starts; 4 requests with 3 drafts each, of 8 tokens."""

    max_num_tokens, table, _sync_device = 8, None, lambda self: None

    def initialize_kv_cache(self, config):
        return "cache"

    def capture_model(self):
        return 7

    def _dummy_run(self, size):
        self.engine.forward_pass(size)
        return np.zeros(size)

    def use_table(self, table, forward_only):
        self.table = table


@pytest.mark.parametrize(("graphs", "waits"), [(None, 0), ("NONE", 0), ("PIECEWISE", 1), ("FULL_AND_PIECEWISE", 1)])
def test_a_table_is_measured_once_vllm_has_captured_its_graphs(monkeypatch, graphs, waits):
    engine, alone = Engine(monkeypatch, lambda size: 0.001 * max(4, size)), SimpleNamespace(is_last_rank=True)
    alone.broadcast_object = lambda number, src: number
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: alone)
    monkeypatch.setattr(parallel_state, "get_world_group", lambda: alone)
    modes = SimpleNamespace(cudagraph_mode=graphs and CUDAGraphMode[graphs], cudagraph_capture_sizes=[8, 4, 2, 1])
    config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=graphs is None), compilation_config=modes)
    config.speculative_config = SimpleNamespace(num_speculative_tokens=3)
    config.scheduler_config = SimpleNamespace(max_num_seqs=4)
    runner = Runner(engine=engine, vllm_config=config, model=SimpleNamespace(compute_logits=lambda hidden: None))
    runner.drafter = SimpleNamespace(policy=SimpleNamespace(has_table=False, use_table=runner.use_table))
    warmup_cost.measure_at_warm_up(runner)
    assert runner.initialize_kv_cache("config") == "cache" and (runner.table is None) == bool(waits)
    assert runner.capture_model() == 7
    # A pass has the tokens of the graph that replays it; between sizes a line is taken, and the last slope goes on.
    assert set(engine.passes) == ({1, 2, 4, 8} if waits else {1, 2, 4, 6, 8})
    found = runner.table.milliseconds[[0, 1, 2], [0, 2, 3], 0]  # of 1, 6 and 16 tokens
    assert found == pytest.approx([4.0, 8.0 if waits else 6.0, 16.0]) and runner.table.requests.tolist() == [1, 2, 4]
