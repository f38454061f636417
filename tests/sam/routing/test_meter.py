"""What a router's decisions came to: slots, waiting, estimates, the last start."""

import pytest

from sam.routing.meter import Meter
from sam.routing.policy import ContextPolicy, RoutingSettings


class Clocked:
    """A policy with a meter and a clock that is set by hand."""

    def __init__(self, slots: int, replicas: int = 1, **routing):
        self.policy = ContextPolicy(RoutingSettings(**routing))
        self.meter, self.now = Meter(self.policy), 0.0
        for i in range(replicas):
            self("add_replica", f"r{i}", 1 << 20, slots)

    def __call__(self, name, *arguments):
        getattr(self.policy, name)(*arguments)
        self.meter.event(self.now, name, arguments[0])

    def decide(self):
        placements = self.policy.decide()
        self.meter.decided(self.now, placements)
        return [placement.request for placement in placements]

    def take(self):
        return self.meter.take(self.now)


def test_slots_waiting_and_the_last_start():
    made = Clocked(slots=2)
    for name in "abc":
        made("arrive", name, "g", 10, 100)
    assert made.decide() == ["a", "b"]
    made.now = 4.0
    made("finish", "a", 50)
    assert made.decide() == ["c"]
    made.now = 5.0
    made("finish", "b", 60)
    made.now = 7.0
    made("finish", "c", 40)
    made.now = 100.0  # nothing runs and nothing waits
    found = made.take()
    assert found["waiting_max"] == 3 and found["admissions"] == 3
    assert found["idle_slot_share"] == pytest.approx(2 / 14)  # a slot for two of seven seconds
    assert found["last_start_to_end_seconds"] == pytest.approx(3.0)
    assert found["estimate_error"] == (abs(50 - 60) + abs(55 - 40)) / 2, "55: the geometric mean of 50 and 60"
    assert found["estimates_group"] == 2 and found["estimate_error_group"] == found["estimate_error"]
    assert found["estimates_history"] == found["estimate_error_history"] == 0
    again = made.take()
    assert again["admissions"] == again["idle_slot_share"] == again["last_start_to_end_seconds"] == 0


def test_a_chunk_that_goes_on_is_no_start_and_a_move_costs_its_context():
    made = Clocked(slots=1, replicas=2, chunk_tokens=16)
    made("arrive", "a", "g", 10, 100)
    assert made.decide() == ["a"]
    made.now = 1.0
    made("remove_replica", made.policy.where("a"))
    made("proceed", "a", 16)
    assert made.decide() == ["a"]
    made.now = 3.0
    made("finish", "a", 4)
    found = made.take()
    assert found["last_start_to_end_seconds"] == 3.0, "from the first chunk"
    assert (found["moves"], found["prefill_tokens"], found["admissions"]) == (1, 26, 2)


def test_estimates_are_told_apart_by_where_they_came_from():
    made = Clocked(slots=8)
    made("arrive", "a", "g", 10, 100, 0, 60)
    made("arrive", "b", "g", 10, 100, 0, 60)
    made("arrive", "c", "h", 10, 100)
    made.decide()
    made("finish", "c", 70)  # nothing was known of its group
    made("finish", "a", 40)
    made("finish", "b", 40)
    found = made.take()
    assert (found["estimates_history"], found["estimate_error_history"]) == (1, 20)
    assert (found["estimates_group"], found["estimate_error_group"]) == (1, 12), "60, 60 and 40 give 52"
    assert found["estimate_error"] == 16
