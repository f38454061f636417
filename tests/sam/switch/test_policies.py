"""When drafting is on, by every policy, while requests end one by one."""

import numpy as np
import pytest

from sam.switch.policies import make_policy
from sam.switch.step_cost import StepState, linear

TIMELINE = np.array([*range(96, 0, -1), *[1] * 30])


@pytest.mark.parametrize(
    "name, switched_on", [("threshold", 8 + 30), ("always", len(TIMELINE)), ("never", 0), ("goodput", 59 + 30)]
)
def test_requests_that_end_one_by_one_through_every_policy(name, switched_on):
    """96 requests end one by one; each first draft token is accepted with probability 0.5, a second with 0.25.

    A request costs nothing beyond its token and 63 tokens double a step, so a draft token pays while
    0.5 > running / (running + 63): below 63 requests, and brings the hundredth that it must bring below 60.
    """
    halves = np.array([0.5, 0.25], np.float32)
    policy, decisions = make_policy(name, 2, 8, step_cost=linear(63.0, 0.0, 1.0)), np.zeros(len(TIMELINE), np.int64)
    for step, running in enumerate(TIMELINE.tolist()):
        state = StepState(running)
        if policy.plan(state).budget:
            drafts = np.tile(halves, running), np.arange(running + 1) * 2
            decisions[step] = policy.choose(state, *drafts).sum()
        drafted = int(decisions[step])
        policy.observe(state, drafted, round(drafted * float(halves.mean())), 63.0 + running + drafted)
    assert (decisions > 0).sum() == pytest.approx(switched_on, abs=2 if name == "goodput" else 0)
    if name == "threshold":
        assert decisions.tolist() == np.where(TIMELINE <= 8, 2 * TIMELINE, 0).tolist()
    if name == "goodput":
        assert decisions[0] == 0 and decisions[-1] == 2
        between = (TIMELINE > 30) & (TIMELINE < 55)
        assert (decisions == TIMELINE)[between].all(), "one token each there"
