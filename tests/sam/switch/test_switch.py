"""Which steps a policy is told of, and when it is not asked."""

import pytest

from sam.switch.policies import Plan, Policy, Switch
from sam.switch.step_cost import StepState

NAMES = ["a", "b"]


class Told(Policy):
    """Plans what it is given, and keeps what it is told."""

    def __init__(self, *plans: Plan):
        super().__init__()
        self.plans = [*plans]
        self.told = []
        self.states = []

    def plan(self, state):
        self.states.append(state)
        return self.plans.pop(0)

    def observe(self, state, drafted, accepted, milliseconds):
        self.told.append((state.running, drafted, accepted, milliseconds))


def switch_of(*plans: Plan) -> Switch:
    return Switch(Told(*plans), {"skipped_steps": 0})


@pytest.mark.parametrize(
    ("state", "names", "is_told"),
    [
        (StepState(2), NAMES, True),
        (StepState(2, prefilling=1), NAMES, False),
        (StepState(2), ["a", "c"], False),
        (StepState(3), [*NAMES, "c"], False),
    ],
)
def test_a_policy_learns_of_steps_whose_requests_all_decode_and_stay(state, names, is_told):
    switch = switch_of(Plan(3), Plan(3))
    switch.plan(1.0, StepState(2), NAMES)
    switch.observe(1.5, state, names, drafted=6, accepted=4)
    assert switch.policy.told == ([(2, 6, 4, 500.0)] if is_told else [])


def test_nothing_is_learnt_of_a_step_that_began_with_a_prompt():
    switch = switch_of(Plan(3))
    switch.plan(1.0, StepState(2, prefilling=1), NAMES)
    switch.observe(1.5, StepState(2), NAMES, drafted=0, accepted=0)
    assert switch.policy.told == []


def test_a_pause_holds_while_as_many_requests_run():
    switch = switch_of(Plan(0, valid_for_steps=3), Plan(2))
    assert not switch.holds(1.0, 2), "before the first plan"
    switch.plan(1.0, StepState(2), NAMES)
    assert not switch.wants_drafts
    assert switch.holds(2.0, 2) and switch.holds(3.0, 2) and not switch.holds(4.0, 3)
    switch.plan(4.0, StepState(3), [*NAMES, "c"])
    assert switch.policy.states[-1].steps_since_plan == 3
    assert switch.wants_drafts and not switch.holds(5.0, 3)
