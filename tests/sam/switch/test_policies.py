"""When drafting is on: the published switch, and every policy while requests end one by one."""

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear


@pytest.mark.parametrize("running, budget", [(1, 3), (8, 3), (9, 0), (400, 0)])
def test_threshold_is_the_published_switch(running, budget):
    policy = make_policy("threshold", 3, 8)
    assert policy.plan(StepState(running)).budget == budget
    assert policy.plan(StepState(running)).min_acceptance == 0.0


def test_threshold_verifies_whole_drafts():
    policy = make_policy("threshold", 3, 8)
    acceptance, offsets = np.array([0.9, 0.1, 0.5], np.float32), np.array([0, 2, 2, 3])
    assert policy.choose(StepState(3), acceptance, offsets).tolist() == [2, 0, 1]


def test_always_and_never():
    assert make_policy("always", 5, 0).plan(StepState(10_000)).budget == 5
    assert make_policy("never", 5, 100).plan(StepState(0)).budget == 0


TIMELINE = [*range(96, 0, -1), *[1] * 30]


@pytest.mark.parametrize(
    "name, switched_on", [("threshold", 8 + 30), ("always", len(TIMELINE)), ("never", 0), ("goodput", 59 + 30)]
)
def test_requests_that_end_one_by_one_through_every_policy(name, switched_on):
    """96 requests end one by one; each first draft token is accepted with probability 0.5, a second with 0.25.

    A request costs nothing beyond its token and 63 tokens double a step, so a draft token pays while
    0.5 > running / (running + 63): below 63 requests, and brings the hundredth that it must bring below 60.
    """
    policy = make_policy(name, 2, 8, step_cost=linear(63.0, 0.0, 1.0))
    decisions = []
    for running in TIMELINE:
        state = StepState(running)
        decisions.append(0)
        if policy.plan(state).budget:
            acceptance, offsets = np.tile(np.array([0.5, 0.25], np.float32), running), np.arange(running + 1) * 2
            decisions[-1] = int(policy.choose(state, acceptance, offsets).sum())
        policy.observe(state, decisions[-1], decisions[-1] // 2, 63.0 + running + decisions[-1])
        if name == "threshold":
            assert decisions[-1] == (2 * running if running <= 8 else 0)
    assert sum(decision > 0 for decision in decisions) == pytest.approx(switched_on, abs=2 if name == "goodput" else 0)
    if name == "goodput":
        assert decisions[0] == 0 and decisions[-1] == 2
        assert all(d == r for d, r in zip(decisions, TIMELINE, strict=True) if 30 < r < 55), "one token each there"


@pytest.mark.parametrize("settings", [("threshold", 0, 8), ("threshold", 3, -1), ("x", 3, 8)])
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match="expected"):
        make_policy(*settings)
