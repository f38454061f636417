"""The routing policy: its order, what replicas hold, and that no request is lost, doubled or left waiting."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sam.routing import ContextPolicy, RoutingSettings
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


def started(made: ContextPolicy) -> list[str]:
    return [start.request for start in made.decide()]


def test_one_probe_of_each_group_first_and_an_aborted_one_is_replaced():
    made = policy(slots=3)
    arrive(made, groups=4, samples=4)
    assert started(made) == ["0.0", "1.0", "2.0"]
    made.finish("1.0", 5)
    assert started(made) == ["3.0"], "the probe that is left goes before siblings"
    made.abort("0.0")
    assert started(made) == ["0.1"]


@pytest.mark.parametrize(
    ("chunk", "lengths", "expected"),
    [
        (None, {"0.0": 10, "1.0": 90, "2.0": 40}, ["1.1", "1.2", "2.1"]),
        # Group 2's probe still runs: longer than those that have finished, unless chunks show how far it is.
        (None, {"0.0": 10, "1.0": 90}, ["2.1", "2.2"]),
        (1000, {"0.0": 10, "1.0": 90}, ["1.1", "1.2"]),
        (1000, {"0.0": 10}, ["1.1"]),
    ],
)
def test_the_longest_group_goes_first_once_a_response_has_finished(chunk, lengths, expected):
    made = policy(slots=3, chunk_tokens=chunk)
    arrive(made, groups=3, samples=3)
    started(made)
    for name, length in lengths.items():
        made.finish(name, length)
    assert started(made) == expected


def test_the_next_turn_of_a_conversation_keeps_its_place():
    made = policy(slots=1)
    arrive(made, groups=3, samples=2)
    assert started(made) == ["0.0"]
    made.finish("0.0", 10)
    assert started(made) == ["1.0"], "while the conversation's tool runs"
    made.arrive("second turn", "0.0 and more", 40, 100, near="r0")
    made.finish("1.0", 10)
    assert started(made) == ["second turn"]


def test_lengths_known_beforehand_need_no_probe_and_count_until_responses_say_otherwise():
    made = policy(slots=2)
    for name in ("long.0", "long.1", "short.0", "long.2", "short.1", "long.3", "short.2"):
        group, _ = name.split(".")
        made.arrive(name, group, 10, 1000, expected={"long": 400, "short": 40}[group])
    assert started(made) == ["long.0", "long.1"]
    for name in ("long.0", "long.1"):  # they have become short
        made.finish(name, 3)
    assert started(made) == ["short.0", "short.1"], "sqrt(400 * 3) = 35 < 40"


def test_a_replica_is_given_no_more_than_its_kv_cache_holds_to_the_end_of_the_chunk():
    made = policy(slots=8, kv_tokens=256, chunk_tokens=54)  # 10 + 54 tokens: 64 in blocks of 16
    arrive(made, groups=1, samples=8)
    assert len(started(made)) == 4 and made.counters["held_by_kv"] == 1
    made.proceed("0.0", 54)
    assert started(made) == [], "it needs 128 now, and 64 are free: nothing overtakes it"
    made.finish("0.1", 3)
    assert started(made) == ["0.0"]
    alone = policy(slots=8, kv_tokens=64)
    arrive(alone, groups=1, samples=2)
    assert started(alone) == ["0.0"], "one that is larger than the cache runs alone"
    ahead = policy(slots=2, replicas=2, ahead=1)
    arrive(ahead, groups=1, samples=8)
    placed = [start.replica for start in ahead.decide()]
    assert (sorted(placed[:4]), sorted(placed[4:])) == (["r0", "r0", "r1", "r1"], ["r0", "r1"]), "once no slot is free"


@pytest.mark.parametrize(("prompt", "goes_to", "read_again"), [(10, "r1", 10 + 32), (1000, "r0", 0)])
def test_a_chunk_returns_to_its_replica_or_moves_to_a_far_emptier_one_if_that_pays(prompt, goes_to, read_again):
    made = policy(slots=64, replicas=2, chunk_tokens=16)
    for i in range(32):
        made.arrive(str(i), "0", prompt, 100)
    at = {start.request: start.replica for start in made.decide()}
    first = next(name for name, replica in at.items() if replica == "r0")
    made.proceed(first, 16)
    assert [start.replica for start in made.decide()] == ["r0"] and made.counters["prefill_tokens"] == 0
    for name in (name for name, replica in at.items() if replica == "r1"):
        made.finish(name, 80)
    made.proceed(first, 16)
    assert [start.replica for start in made.decide()] == [goes_to]
    assert made.counters["prefill_tokens"] == read_again


@settings(max_examples=1_000, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(
    script=st.binary(max_size=96),
    chunk=st.sampled_from([None, 1, 8, 64]),
    sizes=st.sampled_from([[(62, 2)], [(96, 3), (62, 2)], [(16, 1), (399, 6), (64, 2)]]),
    ahead=st.sampled_from([0, 2]),
)
def test_no_request_is_lost_doubled_or_left_waiting(script, chunk, sizes, ahead):
    world = World(chunk, sizes, ahead)
    play(world, script)
    world.drain()
    again = World(chunk, sizes, ahead)
    play(again, script)
    again.drain()
    assert again.starts == world.starts, "equal events give equal decisions"


def test_settings_that_make_no_sense_are_one_line():
    for chunk in (0, -5, True):
        with pytest.raises(ValueError, match=f"^routing.chunk_tokens={chunk}: expected an integer of at least 1, or"):
            RoutingSettings(chunk)
