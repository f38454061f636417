"""Step costs of engines that schedule and replay otherwise than the one that was measured."""

import doctest

import numpy as np
import pytest

from sam.simulate.setups import SETUPS, load_step_cost
from sam.switch import host_time
from sam.switch.host_time import Scheduling, is_eager
from sam.switch.step_cost import StepCost, linear

# Milliseconds with graphs: 24 plain, 30 with drafts; 4 are the host's.
WITH_DRAFTS = StepCost(*[np.array([1]), np.array([1, 4]), np.array([1])], np.array([[[24.0], [30.0]]]), {"eager": 0})
EAGER = StepCost(*[np.array([1]), np.array([1, 4]), np.array([1])], np.array([[[90.0], [96.0]]]), {"eager": 1})


def steps(table: StepCost, **scheduling) -> list[float]:
    """Of one request: a step without drafts, and one with three."""
    return Scheduling(host_ms=4.0, **scheduling).apply(table).step_ms(1, [1, 4], 1).round(6).tolist()


def test_examples():
    failed, tried = doctest.testmod(host_time)
    assert tried > 0 and failed == 0


def test_the_host_is_paid_in_full_or_hidden_behind_the_device():
    assert steps(WITH_DRAFTS) == [24.0, 30.0]
    assert steps(WITH_DRAFTS, asynchronous=True) == [20.0, 30.0], "a step with drafts waits for its tokens"
    slow_host = Scheduling(asynchronous=True, host_ms=20.0).apply(WITH_DRAFTS)
    assert slow_host.step_ms(1, [1, 2, 4], 1).tolist() == [20.0, 26.0, 30.0], "the host takes longer than the device"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [((1.0, 1.0), [24.0, 30.0]), ((0.0, 0.0), [84.0, 90.0]), ((0.5, 0.75), [39.0, 60.0])],
)
def test_a_step_without_a_graph_is_launched(shares, expected):
    assert steps(WITH_DRAFTS, graph_share=shares, launch_ms=60.0) == expected


def test_where_launching_takes_longest_nothing_hides_it():
    assert steps(EAGER, asynchronous=True, launch_ms=60.0) == [90.0, 96.0]
    assert steps(EAGER, asynchronous=True, launch_ms=60.0, graph_share=(1.0, 1.0)) == [26.0, 36.0]
    assert steps(EAGER, asynchronous=True, launch_ms=60.0, graph_share=(0.5, 0.75)) == [42.0, 66.0]


def test_without_graphs_two_thirds_of_a_plain_step_are_launching():
    assert steps(EAGER, graph_share=(1.0, 1.0)) == [30.0, 36.0]
    assert [is_eager(load_step_cost(name)) for name in SETUPS] == [True] * len(SETUPS)
    assert not is_eager(WITH_DRAFTS) and not is_eager(linear(1.0, 1.0, 1.0))


def test_nothing_changes_where_nothing_is_asked_for():
    for table in (EAGER, WITH_DRAFTS):
        tokens = np.arange(1, 20) / 2
        assert Scheduling().apply(table).step_ms(1, tokens, 1) == pytest.approx(table.step_ms(1, tokens, 1))


@pytest.mark.parametrize(
    ("table", "scheduling", "message"),
    [
        (WITH_DRAFTS, {"graph_share": (1.0, 0.5)}, "launch_ms is missing"),
        (EAGER, {"launch_ms": 88.0, "graph_share": (1.0, 1.0)}, "launch_ms=88: a plain step of 90 ms has nothing left"),
        (EAGER, {"graph_share": (1.0, 0.5)}, r"graph_share=\(1.0, 0.5\): a step with drafts would be much faster"),
        (EAGER, {"graph_share": (1.0, 1.5)}, r"graph_share=\(1.0, 1.5\): expected shares"),
        (EAGER, {"launch_ms": -1.0}, "launch_ms=-1.0: expected milliseconds"),
    ],
)
def test_what_cannot_be_is_refused(table, scheduling, message):
    with pytest.raises(ValueError, match=message):
        steps(table, **scheduling)
