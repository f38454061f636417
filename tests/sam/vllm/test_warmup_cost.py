"""The step costs that an engine measures when it starts: how many passes it times, by a clock that they move."""

import numpy as np
import pytest

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


def test_a_slow_engine_stops_within_the_budget_and_another_rank_runs_the_same_passes(monkeypatch):
    slow, decisions = Engine(monkeypatch, lambda size: 0.2 + 0.02 * size), []
    sizes, _ = warmup_cost.measured(slow.forward_pass, 2304, lambda number: decisions.append(number) or number)
    assert 2 <= len(sizes) < len(warmup_cost.SIZES) and slow.now <= warmup_cost.BUDGET_SECONDS
    fast, agreed = Engine(monkeypatch, lambda size: 1e-6 * size), iter(decisions)
    warmup_cost.measured(fast.forward_pass, 2304, lambda number: next(agreed))
    assert fast.passes == slow.passes
    too_slow = Engine(monkeypatch, lambda size: 60.0)
    with pytest.raises(ValueError, match=r"a pass of few tokens takes 60\.0 s"):
        warmup_cost.measured(too_slow.forward_pass, 64, lambda number: number)
