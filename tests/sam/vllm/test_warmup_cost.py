"""The step costs that an engine measures when it starts."""

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


def test_a_fast_engine_measures_every_size_up_to_the_largest_step(monkeypatch):
    engine = Engine(monkeypatch, lambda size: 0.001 + 1e-5 * size)
    sizes, milliseconds = warmup_cost.measured(engine.forward_pass, 600, lambda repeats: repeats)
    assert sizes.tolist() == [size for size in warmup_cost.SIZES if size < 600] + [600]
    np.testing.assert_allclose(milliseconds, 1.0 + 0.01 * sizes)
    assert len(engine.passes) == 1 + len(sizes) * (1 + warmup_cost.WARM_UP_REPEATS)


def test_other_work_in_between_makes_no_size_dearer(monkeypatch):
    """Passes of 2 to 4 s, and of 24 tokens whenever they are timed, are held up."""

    def seconds(size):
        own = 0.01 + 1e-4 * size
        return 10 * own if 2.0 <= engine.now < 4.0 or size == 24 else own

    engine = Engine(monkeypatch, seconds)
    sizes, milliseconds = warmup_cost.measured(engine.forward_pass, 2304, lambda repeats: repeats)
    expected = 10 + 0.1 * np.where(sizes == 24, 32, sizes)
    np.testing.assert_allclose(milliseconds, expected)
    assert engine.now <= warmup_cost.BUDGET_SECONDS


@pytest.mark.parametrize("per_token", [0.004, 0.02, 0.04])
def test_a_slow_engine_stops_within_the_budget(monkeypatch, per_token):
    engine = Engine(monkeypatch, lambda size: 10 * per_token + per_token * size)
    sizes, _ = warmup_cost.measured(engine.forward_pass, 2304, lambda repeats: repeats)
    assert 2 <= len(sizes) < len(warmup_cost.SIZES)
    assert engine.now <= warmup_cost.BUDGET_SECONDS


def test_an_engine_too_slow_to_measure_says_so(monkeypatch):
    engine = Engine(monkeypatch, lambda size: 60.0)
    with pytest.raises(ValueError, match=r"a pass of few tokens takes 60\.0 s"):
        warmup_cost.measured(engine.forward_pass, 64, lambda repeats: repeats)


def test_every_rank_runs_the_passes_of_the_first(monkeypatch):
    slow, decisions = Engine(monkeypatch, lambda size: 0.4 * size), []
    warmup_cost.measured(slow.forward_pass, 2304, lambda repeats: decisions.append(repeats) or repeats)
    fast = Engine(monkeypatch, lambda size: 1e-6 * size)
    agreed = iter(decisions)
    warmup_cost.measured(fast.forward_pass, 2304, lambda repeats: next(agreed))
    assert fast.passes == slow.passes


def test_between_sizes_a_line_is_taken_and_the_last_slope_goes_on():
    sizes = np.array([1, 2, 4, 8, 16])
    milliseconds = np.array([10.0, 10.0, 10.0, 14.0, 22.0])
    costs = warmup_cost._between_and_beyond(np.array([1, 6, 16, 32]), sizes, milliseconds)
    np.testing.assert_allclose(costs, [10.0, 12.0, 22.0, 38.0])


def test_one_point_alone_has_no_slope():
    assert warmup_cost._between_and_beyond(np.array([1, 4]), np.array([1]), np.array([5.0])).tolist() == [5.0, 5.0]
