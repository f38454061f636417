"""What the switch makes of a router's word that requests wait."""

from sam.switch.awaited_requests import PATIENCE_STEPS, AwaitedRequests
from sam.switch.policies import make_policy
from sam.switch.policy import StepState


def told(waiting: int, slots: int = 12) -> AwaitedRequests:
    made = AwaitedRequests(slots)
    made.tell(waiting)
    return made


def test_no_more_are_awaited_than_wait_or_than_there_are_free_slots():
    assert [told(waiting).count(running=9) for waiting in (0, 2, 3, 50)] == [0, 2, 3, 3]
    assert told(50).count(running=12) == told(50).count(running=13) == AwaitedRequests(12).count(3) == 0


def test_a_free_slot_that_nobody_takes_ends_the_wait():
    """The router is gone, or another replica took all that waited."""
    made = told(50)
    assert [made.count(running=11) for _ in range(2 * PATIENCE_STEPS)] == [1] * PATIENCE_STEPS + [0] * PATIENCE_STEPS
    assert made.count(running=12) == made.count(running=11) == 0, "until a request comes and says so"
    made.tell(2)
    assert made.count(running=11) == 1


def test_the_wait_begins_anew_where_the_slots_were_full_meanwhile():
    made = told(50)
    for _ in range(5):
        assert [made.count(running=11) for _ in range(PATIENCE_STEPS)] == [1] * PATIENCE_STEPS
        assert made.count(running=12) == 0


def test_steps_in_which_nobody_asked_count():
    made = told(50)
    assert made.count(running=11, steps=PATIENCE_STEPS) == 1
    assert made.count(running=11) == 0
    assert told(50).count(running=11, steps=PATIENCE_STEPS + 1) == 0


def test_a_last_request_behind_which_none_waits_ends_it_at_once():
    made = told(50)
    assert made.count(running=11) == 1
    made.tell(0)
    assert made.count(running=11) == 0


def test_threshold_counts_requests_that_are_about_to_come():
    policy = make_policy("threshold", 3, batch_size_threshold=8)
    plans = [policy.plan(StepState(8, awaited=awaited)) for awaited in (0, 1, 4, 0)]
    assert [plan.budget for plan in plans] == [3, 0, 0, 3]
    assert [plan.valid_for_steps for plan in plans] == [0, 0, 0, 0], "asked again in the next step"
    assert policy.plan(StepState(9, awaited=3)).valid_for_steps > 0
    assert policy.counters == {"awaited_steps": 2}


def test_hysteresis_counts_them_too():
    policy = make_policy("threshold", 3, batch_size_threshold=8, hysteresis=2)
    states = (StepState(6), StepState(6, awaited=4), StepState(6, awaited=5), StepState(6, awaited=4))
    assert [policy.plan(state).budget for state in states] == [3, 3, 0, 0]


def test_other_policies_decide_by_the_step_that_runs():
    for name in ("always", "never", "goodput"):
        with_, without = make_policy(name, 3, 8), make_policy(name, 3, 8)
        assert with_.plan(StepState(8, awaited=4)) == without.plan(StepState(8))
        assert with_.counters == without.counters == {}
