"""Passes of a draft model, planned by goodput before any of them."""

import numpy as np
import pytest

from sam.drafting.texts import Drafts
from sam.switch.policies import Goodput, make_policy
from sam.switch.step_cost import StepState, linear
from sam.vllm.trained.drafter import PassCost, plan_passes

K = 3
GOOD, BAD, SURE = [0.9, 0.8, 0.7], [0.02, 0.0, 0.0], [0.95, 0.95, 0.95]


def plan(others, expected, pass_ms=0.1, policy="goodput", missing=1):
    """`others`, `expected`: acceptance of another source's drafts and of the model's, by request."""
    flat = np.array([p for one in others for p in one], np.float32)
    drafts = Drafts(np.zeros(len(flat), np.int32), np.cumsum([0, *map(len, others)]), flat)
    cost = PassCost(np.array([1, 101]), np.array([pass_ms, 2 * pass_ms]))
    made = Goodput(K, linear(10.0, 0.0, 1 / 64)) if policy == "goodput" else make_policy(policy, K, 0)
    each = np.full(len(others), missing)
    return plan_passes(made, StepState(len(others)), drafts, np.array(expected), each, cost)


@pytest.mark.parametrize(
    ("others", "expected", "case", "count"),
    [
        pytest.param([[], []], [GOOD, GOOD], {}, K, id="good drafts that cost little"),
        pytest.param([[], []], [GOOD, GOOD], {"pass_ms": 100.0}, 0, id="dear passes"),
        pytest.param([[], []], [GOOD, GOOD], {"missing": 900_000}, 0, id="much to catch up with"),
        pytest.param([[]], [GOOD], {"missing": 100_000}, K, id="100 ms of reading that pay over many steps"),
        pytest.param([[], []], [BAD, BAD], {}, 0, id="drafts that are not accepted"),
        pytest.param([[]], [[0.9, 0.01, 0.0]], {}, 1, id="little is expected of later passes"),
        pytest.param([SURE, SURE], [GOOD, GOOD], {"policy": "always"}, 0, id="no request wants one"),
        pytest.param([[], []], [BAD, [0.0] * K], {"policy": "always", "pass_ms": 1e6}, K, id="no step costs"),
    ],
)
def test_passes_are_made_where_they_bring_more_than_they_cost(others, expected, case, count):
    assert plan(others, expected, **case).count == count


def test_each_request_takes_the_source_that_expects_more():
    found = plan([SURE, [0.1], []], [GOOD, GOOD, GOOD])
    assert found.wanted.tolist() == [False, True, True] and found.count > 0
    assert plan([[], []], [BAD, [0.0] * K], policy="always").wanted.tolist() == [True, False], "a draft without room"
