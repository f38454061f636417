"""Passes of a draft model, planned by goodput before any of them."""

import numpy as np
import pytest

from sam.drafting.texts import Drafts
from sam.switch.policies import Goodput, make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear
from sam.vllm.trained.drafter import PassCost, plan_passes

K = 3


def drafts(*acceptance):
    """Of another source, by request."""
    flat = np.array([p for one in acceptance for p in one], np.float32)
    offsets = np.cumsum([0, *map(len, acceptance)]).astype(np.int64)
    return Drafts(np.zeros(len(flat), np.int32), offsets, flat)


def plan(others, expected, pass_ms=0.1, policy=None, missing=None):
    requests = len(others)
    cost = PassCost(np.array([1, 101]), np.array([pass_ms, 2 * pass_ms]))
    missing = np.ones(requests, np.int64) if missing is None else missing
    policy = policy or Goodput(K, linear(10.0, 0.0, 1 / 64))
    return plan_passes(policy, StepState(requests), drafts(*others), np.array(expected), missing, cost)


GOOD, BAD = [0.9, 0.8, 0.7], [0.02, 0.0, 0.0]


def test_good_drafts_that_cost_little_are_made():
    found = plan([[], []], [GOOD, GOOD])
    assert found.count == K and found.wanted.all()
    assert found.milliseconds == pytest.approx(0.1 * (1.01 + 2 * 1.01))


@pytest.mark.parametrize(
    "case", [{"pass_ms": 100.0}, {"missing": np.array([900_000] * 2)}], ids=["dear", "much to catch up with"]
)
def test_no_pass_where_it_costs_more_than_it_brings(case):
    assert plan([[], []], [GOOD, GOOD], **case).count == 0


def test_what_was_missed_is_spread_over_the_steps_that_profit():
    """100 ms of reading in a step of 10 ms pay where they are done once."""
    missing = np.array([100_000])
    found = plan([[]], [GOOD], missing=missing)
    assert found.count > 0 and found.milliseconds > 100.0


def test_no_pass_for_drafts_that_are_not_accepted():
    assert plan([[], []], [BAD, BAD]).count == 0


def test_later_passes_are_left_out_where_little_is_expected_of_them():
    assert plan([[]], [[0.9, 0.01, 0.0]]).count == 1


def test_each_request_takes_the_source_that_expects_more():
    found = plan([[0.95, 0.95, 0.95], [0.1], []], [GOOD, GOOD, GOOD])
    assert found.wanted.tolist() == [False, True, True] and found.count > 0


def test_no_pass_when_no_request_wants_one():
    found = plan([[0.95, 0.95, 0.95]] * 2, [GOOD, GOOD], policy=make_policy("always", K, 0))
    assert found.count == 0 and not found.wanted.any()


def test_without_step_costs_as_many_passes_as_there_are():
    found = plan([[], []], [BAD, [0.0] * K], policy=make_policy("always", K, 0), pass_ms=1e6)
    assert found.count == K and found.wanted.tolist() == [True, False]  # the second has no room
