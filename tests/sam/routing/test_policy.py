"""The routing policy: its order, what replicas hold, and that no request is lost, doubled or left waiting."""

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sam.routing.policy import ContextPolicy, RoutingSettings
from tests.sam.routing.schedule import World, play


def policy(slots=2, kv_tokens=1 << 20, replicas=1, **routing) -> ContextPolicy:
    made = ContextPolicy(RoutingSettings(**routing))
    for i in range(replicas):
        made.add_replica(f"r{i}", kv_tokens, slots)
    return made


def arrive(made: ContextPolicy, groups: int, samples: int, limit: int = 100) -> None:
    for group in range(groups):
        for sample in range(samples):
            made.arrive(f"{group}.{sample}", str(group), 10, limit)


def started(made: ContextPolicy, settled: bool = True) -> list[str]:
    return [placement.request for placement in made.decide(settled)]


def test_one_probe_of_each_group_first():
    made = policy(slots=3)
    arrive(made, groups=4, samples=4)
    assert started(made) == ["0.0", "1.0", "2.0"]
    made.finish("1.0", 5)
    assert started(made) == ["3.0"], "the probe that is left goes before siblings"


def test_before_more_may_come_only_probes_start():
    made = policy(slots=8)
    arrive(made, groups=2, samples=4)
    assert started(made, settled=False) == ["0.0", "1.0"]
    assert started(made, settled=True) == ["0.1", "0.2", "0.3", "1.1", "1.2", "1.3"]


def test_longest_group_first_once_a_response_has_finished():
    made = policy(slots=3)
    arrive(made, groups=3, samples=3)
    started(made)
    for name, length in (("0.0", 10), ("1.0", 90), ("2.0", 40)):
        made.finish(name, length)
    assert started(made) == ["1.1", "1.2", "2.1"]


def test_a_group_without_an_estimate_goes_before_one_known_to_be_short_and_after_one_known_to_be_long():
    made = policy(slots=3, chunk_tokens=1000)
    arrive(made, groups=3, samples=3)
    started(made)
    made.finish("0.0", 10)
    made.finish("1.0", 90)  # typical: 50
    assert started(made) == ["1.1", "1.2"]
    made.finish("1.1", 90)
    assert started(made) == ["2.1"], "group 2, whose probe still runs, before the short group 0"


def test_whole_responses_of_groups_without_an_estimate_go_before_all_others():
    """The probes that still run are longer than those that have finished."""
    made = policy(slots=3)
    arrive(made, groups=3, samples=3)
    started(made)
    made.finish("0.0", 10)
    made.finish("1.0", 90)
    assert started(made) == ["2.1", "2.2"]


def test_the_longest_response_so_far_counts_before_any_has_finished():
    made = policy(slots=2, chunk_tokens=16)
    arrive(made, groups=2, samples=3)
    started(made)
    made.proceed("1.0", 16)
    assert started(made) == ["1.0"], "a response under way keeps its place"
    made.add_replica("another", 1 << 20, 2)
    assert started(made) == ["1.1", "1.2"]


def test_an_aborted_probe_is_replaced():
    made = policy(slots=8)
    arrive(made, groups=1, samples=3)
    assert started(made, settled=False) == ["0.0"]
    made.abort("0.0")
    assert started(made, settled=False) == ["0.1"]


def test_the_next_turn_of_a_conversation_keeps_its_place():
    made = policy(slots=1)
    arrive(made, groups=3, samples=2)
    assert started(made) == ["0.0"]
    made.finish("0.0", 10)
    assert started(made, settled=False) == ["1.0"], "while the conversation's tool runs"
    made.arrive("second turn", "0.0 and more", 40, 100, near="r0")
    made.finish("1.0", 10)
    assert started(made, settled=False) == ["second turn"]
    made.abort("second turn")
    made.arrive("of another replica", "0.1 and more", 40, 100, near="gone")
    assert started(made, settled=False) == ["of another replica"]
    made.finish("of another replica", 10)
    assert started(made) == ["2.0"] and made.waiting == 3


def test_lengths_known_beforehand_need_no_probe():
    made = policy(slots=1)
    for name, expected in (("a", 5), ("b", 500), ("c", 50)):
        made.arrive(name, name, 10, 1000, expected=expected)
    order = []
    while names := started(made):
        order += names
        made.finish(names[0], 1)
    assert order == ["b", "c", "a"]


def test_lengths_known_beforehand_count_until_responses_of_the_group_say_otherwise():
    made = policy(slots=2)
    for name in ("long.0", "long.1", "short.0", "long.2", "short.1", "long.3", "short.2"):
        group, _ = name.split(".")
        made.arrive(name, group, 10, 1000, expected={"long": 400, "short": 40}[group])
    assert started(made) == ["long.0", "long.1"]
    for name in ("long.0", "long.1"):  # they have become short
        made.finish(name, 3)
    assert made.counters["estimates_history"] == 1, "the second has an estimate with a response of the group in it"
    assert made.counters["estimate_error_history"] == 400 - 3
    assert started(made) == ["short.0", "short.1"], "sqrt(400 * 3) = 35 < 40"


def test_groups_without_a_history_are_probed_as_ever():
    made = policy(slots=3)
    made.arrive("known.0", "known", 10, 1000, expected=30)
    arrive(made, groups=2, samples=2)
    assert started(made, settled=False) == ["0.0", "1.0"]
    assert started(made) == ["0.1"], "a probe that still runs may be long"


def test_a_replica_is_given_no_more_than_its_kv_cache_holds_to_the_end_of_the_chunk():
    made = policy(slots=8, kv_tokens=256, chunk_tokens=54)  # 10 + 54 tokens: 64 in blocks of 16
    arrive(made, groups=1, samples=8)
    assert len(started(made)) == 4
    assert made.counters["held_by_kv"] == 1
    made.proceed("0.0", 54)
    # It needs 128 now, and 64 are free: nothing overtakes it.
    assert started(made) == []
    made.finish("0.1", 3)
    assert started(made) == ["0.0"]


def test_a_request_larger_than_the_cache_runs_alone():
    made = policy(slots=8, kv_tokens=64)
    arrive(made, groups=1, samples=2)
    assert started(made) == ["0.0"]
    made.finish("0.0", 1)
    assert started(made) == ["0.1"]


def test_a_replica_is_given_requests_ahead_once_no_slot_is_free_anywhere():
    made = policy(slots=2, replicas=2, ahead=1)
    arrive(made, groups=1, samples=8)
    placed = [placement.replica for placement in made.decide()]
    assert sorted(placed[:4]) == ["r0", "r0", "r1", "r1"] and sorted(placed[4:]) == ["r0", "r1"]
    assert made.slots() == (4, 4) and made.counters["held_by_kv"] == 0


def test_who_has_waited_for_max_wait_admissions_goes_first():
    def position(max_wait: int) -> int:
        made = policy(slots=1, max_wait=max_wait)
        made.arrive("short", "short", 10, 1000, expected=1)
        order, number = [], 0
        while "short" not in order:
            made.arrive(f"long{number}", f"long{number}", 10, 1000, expected=500)
            number += 1
            names = started(made)
            order += names
            made.finish(names[0], 500)
            if number > 50:
                break
        return len(order)

    assert position(max_wait=7) == 8
    assert position(max_wait=65536) == 51, "the control: it starves"


def test_siblings_stay_near_each_other_while_loads_are_alike():
    made = policy(slots=64, replicas=4)
    arrive(made, groups=4, samples=4)
    placed = {p.request: p.replica for p in made.decide()}
    homes = [{placed[f"{group}.{sample}"] for sample in range(4)} for group in range(4)]
    assert all(len(home) < 4 for home in homes)
    loads = made.running()
    assert max(loads.values()) - min(loads.values()) <= 64 / 16 + 1


def test_equal_events_give_equal_decisions():
    script = bytes(range(256)) * 2
    first, second = (World(8, 20, [(96, 3), (64, 2)]) for _ in range(2))
    play(first, script)
    play(second, script)
    assert first.starts == second.starts and len(first.starts) > 50


@settings(max_examples=10_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    script=st.binary(max_size=96),
    chunk=st.sampled_from([None, 1, 8, 64]),
    max_wait=st.sampled_from([1, 5, 1000]),
    sizes=st.sampled_from([[(62, 2)], [(96, 3), (62, 2)], [(16, 1), (399, 6), (64, 2)]]),
    ahead=st.sampled_from([0, 2]),
)
def test_no_request_is_lost_doubled_or_left_waiting(script, chunk, max_wait, sizes, ahead):
    world = World(chunk, max_wait, sizes, ahead)
    play(world, script)
    world.drain()
    assert world.policy.entries <= 7 * 64 + len(sizes)


def test_a_decision_looks_at_few_entries_and_the_tables_stay_small():
    replicas, groups, samples = 64, 625, 16
    made = policy(slots=32, kv_tokens=400_000, replicas=replicas, chunk_tokens=512)
    lengths = {f"{g}.{s}": 100 + 7919 * (g * samples + s) % 3000 for g in range(groups) for s in range(samples)}
    arrive(made, groups, samples, limit=4000)
    generated = dict.fromkeys(lengths, 0)
    decisions, most = 0, made.entries
    running = [(p.request, p.tokens) for p in made.decide()]
    while running:
        decisions += len(running)
        for name, tokens in running:
            left = lengths[name] - generated[name]
            generated[name] += min(left, tokens)
            made.finish(name, left) if tokens >= left else made.proceed(name, tokens)
        running = [(p.request, p.tokens) for p in made.decide()]
        most = max(most, made.entries)
    assert generated == lengths
    assert made.operations[0] / decisions < 4 * math.log2(groups * samples)
    assert most < 8 * groups * samples


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_tokens": 0}, "routing.chunk_tokens=0: expected an integer of at least 1, or null for no chunks"),
        ({"chunk_tokens": -5}, "routing.chunk_tokens=-5"),
        ({"chunk_tokens": True}, "routing.chunk_tokens=True"),
        ({"max_wait": 0}, "routing.max_wait=0: expected an integer of at least 1"),
    ],
)
def test_settings_that_make_no_sense_are_one_line(settings, message):
    with pytest.raises(ValueError, match=message) as error:
        RoutingSettings(**settings)
    assert "\n" not in str(error.value)
