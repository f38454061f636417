"""Responses in chunks: which goes on first, and where."""

import pytest

from tests.sam.routing.test_policy import arrive, policy, started


def test_the_longest_response_of_a_group_does_not_go_on_last():
    made = policy(slots=2, chunk_tokens=40)
    for name in ("longest", "other"):
        made.arrive(name, "group", 10, 100, expected=30)
    assert len(made.decide()) == 2
    made.proceed("longest", 40)
    made.proceed("other", 25)
    made.add_replica("r0", 1 << 20, slots=1)
    assert started(made) == ["longest"], "half of 40 more, and 15 up to those 40"


def test_a_chunk_returns_to_its_replica_or_moves_to_a_far_emptier_one():
    made = policy(slots=64, replicas=2, chunk_tokens=16)
    arrive(made, groups=1, samples=32)
    made.decide()
    here = [f"0.{i}" for i in range(32) if made.where(f"0.{i}") == "r0"]
    made.proceed(here[0], 16)
    assert [p.replica for p in made.decide()] == ["r0"]
    assert made.counters["moves"] == 0
    for name in [f"0.{i}" for i in range(32) if made.where(f"0.{i}") == "r1"]:
        made.finish(name, 80)
    made.proceed(here[0], 16)
    assert [p.replica for p in made.decide()] == ["r1"]
    assert made.counters["moves"] == 1 and made.counters["prefill_tokens"] == 10 + 32


def test_requests_of_a_lost_replica_go_on_elsewhere_from_their_last_token():
    made = policy(slots=4, replicas=2, chunk_tokens=16)
    arrive(made, groups=1, samples=2, limit=40)
    made.decide()
    there = next(f"0.{i}" for i in range(2) if made.where(f"0.{i}") == "r1")
    made.proceed(there, 16)
    made.decide()
    assert made.remove_replica("r1") == [there] and made.where(there) is None
    made.proceed(there, 3)
    assert made.decide() == [(there, "r0", 16)]
    made.proceed(there, 16)
    assert made.decide() == [(there, "r0", 5)], "of 40 tokens 35 are there"


def test_a_long_context_stays_as_all_of_it_would_be_read_again():
    made = policy(slots=64, replicas=2, chunk_tokens=16)
    for i in range(32):
        made.arrive(str(i), "0", 1000, 100)
    made.decide()
    here, there = ([str(i) for i in range(32) if made.where(str(i)) == name] for name in ("r0", "r1"))
    for name in there:
        made.finish(name, 80)
    made.proceed(here[0], 16)
    assert [p.replica for p in made.decide()] == ["r0"]
    assert made.counters["prefill_tokens"] == 0


@pytest.mark.parametrize(("expected", "first"), [(49, "new"), (47, "between")])
def test_a_new_response_of_a_far_longer_group_goes_before_one_between_two_chunks(expected, first):
    """Where the KV cache is full some response always waits between two chunks: long groups would start last."""
    made = policy(slots=1, chunk_tokens=16)
    made.arrive("between", "short", 10, 100, expected=20)
    assert started(made) == ["between"]
    made.arrive("new", "long", 10, 100, expected=expected)
    made.proceed("between", 16)
    assert started(made, settled=False) == ["between"], "while more may come"
    made.proceed("between", 0)
    assert started(made) == [first], "of one that has 16 tokens half as many more are expected, 24 in all"


def test_one_between_two_chunks_is_overtaken_for_max_wait_admissions_at_most():
    made = policy(slots=1, chunk_tokens=16, max_wait=3)
    made.arrive("between", "short", 10, 1000, expected=20)
    made.decide()
    made.proceed("between", 16)
    for number in range(9):
        made.arrive(f"long{number}", f"long{number}", 10, 1000, expected=500)
    order = []
    for _ in range(4):
        order += started(made)
        if order[-1] != "between":
            made.finish(order[-1], 500)
    assert order == ["long0", "long1", "long2", "between"]
