"""What the switch makes of a router's word that requests wait."""

from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.queued_requests import PATIENCE_STEPS, QueuedRequests


def told(queued: int) -> QueuedRequests:
    made = QueuedRequests(12)
    made.update(queued)
    return made


def test_no_more_are_expected_than_wait_or_than_there_are_free_slots():
    assert [told(queued).expected(running=9) for queued in (0, 2, 3, 50)] == [0, 2, 3, 3]
    assert told(50).expected(running=12) == told(50).expected(running=13) == QueuedRequests(12).expected(3) == 0


def test_a_free_slot_that_nobody_takes_ends_the_wait():
    """The router is gone, or another replica took all that waited."""
    made = told(50)
    assert [made.expected(running=11) for _ in range(PATIENCE_STEPS + 2)] == [1] * PATIENCE_STEPS + [0, 0]
    assert made.expected(running=12) == made.expected(running=11) == 0, "until a request comes and says so"
    made.update(2)
    assert made.expected(running=11) == 1
    made.update(0)
    assert made.expected(running=11) == 0, "none is behind the last one"


def test_the_wait_begins_anew_where_the_slots_were_full_meanwhile():
    made = told(50)
    for _ in range(3):
        assert [made.expected(running=11) for _ in range(PATIENCE_STEPS)] == [1] * PATIENCE_STEPS
        assert made.expected(running=12) == 0


def test_steps_in_which_nobody_asked_count():
    made = told(50)
    assert made.expected(running=11, steps=PATIENCE_STEPS) == 1
    assert made.expected(running=11) == 0
    assert told(50).expected(running=11, steps=PATIENCE_STEPS + 1) == 0


def test_threshold_counts_requests_that_are_about_to_come_and_goodput_none():
    policy = make_policy("threshold", 3, batch_size_threshold=8)
    plans = [policy.plan(StepState(8, awaited=awaited)) for awaited in (0, 1, 4, 0)]
    assert [plan.budget for plan in plans] == [3, 0, 0, 3]
    assert [plan.valid_for_steps for plan in plans] == [0, 0, 0, 0], "asked again in the next step"
    assert policy.plan(StepState(9, awaited=3)).valid_for_steps > 0
    assert policy.counters == {"awaited_steps": 2}
    with_, without = make_policy("goodput", 3, 8), make_policy("goodput", 3, 8)
    assert with_.plan(StepState(8, awaited=4)) == without.plan(StepState(8)) and with_.counters == {}
