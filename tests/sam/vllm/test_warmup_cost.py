"""The step costs that an engine measures when it starts."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.config import CUDAGraphMode

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


class Policy:
    has_table = False

    def use_table(self, table, forward_only):
        self.has_table = True


class Runner:
    """What a worker calls of a model runner while an engine starts."""

    def __init__(self, graphs):
        modes = SimpleNamespace(cudagraph_mode=None if graphs is None else CUDAGraphMode[graphs])
        model = SimpleNamespace(enforce_eager=graphs is None)
        self.vllm_config = SimpleNamespace(model_config=model, compilation_config=modes)
        self.drafter = SimpleNamespace(policy=Policy())
        self.measured_after = []

    def initialize_kv_cache(self, config):
        return "cache"

    def capture_model(self):
        return 7


@pytest.mark.parametrize(
    ("graphs", "last"),
    [
        (None, "initialize_kv_cache"),
        ("NONE", "initialize_kv_cache"),
        ("PIECEWISE", "capture_model"),
        ("FULL_AND_PIECEWISE", "capture_model"),
        ("FULL_DECODE_ONLY", "capture_model"),
    ],
)
def test_passes_begin_no_graph_before_vllm_captures_them(monkeypatch, graphs, last):
    runner, begun = Runner(graphs), []
    monkeypatch.setattr(warmup_cost, "_coarse", lambda its: begun.append(now) or "table")
    warmup_cost.measure_at_warm_up(runner)
    now = "initialize_kv_cache"
    assert runner.initialize_kv_cache("config") == "cache"
    if graphs is not None:
        now = "capture_model"
        assert runner.capture_model() == 7
    assert begun == [last] and runner.drafter.policy.has_table


@pytest.mark.parametrize(("size", "padded"), [(1, 1), (3, 4), (8, 8), (9, 9)])
def test_a_pass_has_the_tokens_of_the_graph_that_replays_it(size, padded):
    config = Runner("FULL").vllm_config
    config.compilation_config.cudagraph_capture_sizes = [8, 4, 2, 1]
    assert warmup_cost._padded(size, config) == padded
    assert warmup_cost._padded(size, Runner(None).vllm_config) == size
