"""A shard's memory: what it takes, gives, forgets and evicts."""

import tracemalloc

import numpy as np
import pytest

from sam.drafting.token_ids import digest
from sam.sharing.groups import IDLE_SECONDS, Groups
from sam.sharing.messages import MAX_TOKENS, Message, WrongRunError, offsets_of, shard_of
from tests.sam.sharing.channel import make_groups, tokens

KEY, OTHER = digest(tokens(1, 2)), digest(tokens(3))


def ask(groups, client, *pieces, keys=(KEY,), since=None, now=0.0, run_id="run"):
    """`pieces` of (group, request, position, tokens)."""
    group, request, position = (np.array([piece[i] for piece in pieces], np.int32) for i in range(3))
    texts = [piece[3] for piece in pieces]
    message = Message(
        run_id,
        client,
        b"".join(keys),
        np.array(since or [0] * len(keys), np.int64),
        np.zeros(len(keys), np.int32),
        group,
        request,
        np.zeros(len(pieces), np.int32),
        position,
        offsets_of([len(text) for text in texts]),
        np.concatenate([*texts, tokens()]).astype(np.int32),
    )
    return groups.exchange(message, now)


def pieces_of(reply):
    texts = np.split(reply.tokens, reply.offsets[1:-1]) if len(reply.groups) else []
    names = np.split(reply.names, np.cumsum(reply.named)[:-1])
    pieces = zip(*(column.tolist() for column in (reply.groups, reply.members, reply.positions)), texts, strict=True)
    return [(group, *names[group][member].tolist(), at, text.tolist()) for group, member, at, text in pieces]


def test_siblings_get_what_is_new_and_never_their_own():
    groups = make_groups()
    assert ask(groups, 7, (0, 0, 0, tokens(5, 6))).have.tolist() == [2]
    reply = ask(groups, 8, (0, 3, 0, tokens(9)))
    assert pieces_of(reply) == [(0, 7, 0, 0, [5, 6])] and reply.ends.tolist() == [2]
    assert pieces_of(ask(groups, 8, since=[2])) == []
    reply = ask(groups, 7, (0, 0, 2, tokens(4)), since=[1])
    assert pieces_of(reply) == [(0, 8, 3, 0, [9])] and reply.have.tolist() == [3]
    assert pieces_of(ask(groups, 8, since=[2])) == [(0, 7, 0, 2, [4])]


def test_nothing_is_given_to_who_does_not_ask():
    groups = make_groups()
    ask(groups, 7, (0, 0, 0, tokens(5)))
    assert pieces_of(ask(groups, 8, since=[-1])) == []


def test_doubled_and_overlapping_appends_do_no_harm_and_a_gap_is_not_taken():
    groups = make_groups()
    for position, text, have in (
        (0, tokens(1, 2, 3), 3),
        (0, tokens(1, 2, 3), 3),
        (1, tokens(2, 3, 4), 4),
        (6, tokens(7), 4),
        (4, tokens(5, 6), 6),
    ):
        assert ask(groups, 7, (0, 0, position, text)).have.tolist() == [have]
    assert [piece[3:] for piece in pieces_of(ask(groups, 8))] == [(0, [1, 2, 3]), (3, [4]), (4, [5, 6])]


def test_another_runs_client_is_refused_and_leaves_nothing():
    groups = make_groups()
    with pytest.raises(WrongRunError, match="a client of run other at a shard of run run: refused"):
        ask(groups, 7, (0, 0, 0, tokens(5)), run_id="other")
    assert len(groups) == 0


def test_groups_that_nobody_touches_are_forgotten_and_leave_no_bytes():
    groups = make_groups(ttl=60)
    ask(groups, 7, (0, 0, 0, tokens(5)), (1, 1, 0, tokens(6)), keys=(KEY, OTHER))
    ask(groups, 8, keys=(OTHER,), now=50.0)  # reading is touching
    ask(groups, 8, keys=(digest(tokens(9)),), now=61.0)
    assert len(groups) == 1 and groups.expired == 1
    groups.expire(200.0)
    assert (len(groups), groups.nbytes, groups._by_version) == (0, 0, {})


def test_a_cursor_of_a_forgotten_log_skips_nothing_of_the_next_one():
    groups = make_groups(ttl=60)
    ask(groups, 7, (0, 0, 0, tokens(5)), keys=(KEY,))
    cursor = ask(groups, 8).ends.tolist()
    ask(groups, 7, (0, 1, 0, tokens(6)), (0, 2, 0, tokens(7)), now=100.0)
    assert [piece[-1] for piece in pieces_of(ask(groups, 8, since=cursor, now=100.0))] == [[6], [7]]


def append(groups, key, version, length, now, client=1, position=0):
    return groups.append(key, client, 0, version, position, np.zeros(length, np.int32), now)


def keys(number):
    return [digest(tokens(i)) for i in range(number)]


def test_the_oldest_weight_version_leaves_first_and_the_budget_holds():
    groups = make_groups(budget=100_000)
    old, first, second, third = keys(4)
    for i, (key, version) in enumerate([(first, 1), (old, 0), (second, 1)]):
        append(groups, key, version, 5_000, now=float(i))
    assert append(groups, third, 1, 8_000, now=3.0) == (8_000, False)
    assert set(groups._groups) == {first, second, third} and groups.evicted == 1
    assert groups.nbytes <= groups.budget_bytes


def test_groups_in_use_of_the_same_version_stay_and_the_append_is_refused():
    groups = make_groups(budget=50_000)
    first, second = keys(2)
    append(groups, first, 3, 8_000, now=0.0)
    assert append(groups, second, 3, 8_000, now=1.0) == (0, True)
    assert append(groups, second, 2, 8_000, now=1.0) == (0, True)  # older weights, so newer text stays
    assert list(groups._groups) == [first]
    assert append(groups, second, 3, 8_000, now=2.0 + IDLE_SECONDS) == (8_000, False)  # nobody used it for long
    assert append(groups, second, 3, 20_000, now=40.0, position=8_000) == (8_000, True)  # larger than everything


def test_a_long_log_comes_in_parts_of_bounded_size():
    groups, text = make_groups(), np.arange(3 * MAX_TOKENS, dtype=np.int32)
    for position in range(0, len(text), 1000):
        groups.append(KEY, 7, 0, 0, position, text[position : position + 1000], 0.0)
    got, cursor = [], 0
    for _ in range(4):
        reply = ask(groups, 8, since=[cursor])
        assert len(reply.tokens) <= MAX_TOKENS
        got.append(reply.tokens)
        (cursor,) = reply.ends.tolist()
    assert (np.concatenate(got) == text).all()


def test_counted_bytes_cover_what_is_taken():
    """Many groups of a few short responses, in small pieces: the worst case for Python's own objects."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        groups = Groups("run", 1 << 30, 600.0)
        for i in range(2000):
            key = digest(tokens(i))
            for request in range(4):
                for position in range(0, 60, 2):
                    groups.append(key, request, request, 0, position, np.zeros(2, np.int32), 0.0)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.5 * groups.nbytes < taken <= groups.nbytes
    assert groups.num_tokens == 2000 * 4 * 60


def test_keys_spread_over_the_shards():
    counts = np.bincount([shard_of(digest(tokens(i)), 4) for i in range(4000)])
    assert counts.min() > 850


def test_half_an_hour_of_prompts_that_come_and_go_leaves_no_memory_behind():
    """30 minutes by the shard's clock: new prompts each minute, weights each three; nobody says when one is over."""
    groups, rng, most, longest = make_groups(budget=1 << 30, ttl=300.0), np.random.default_rng(0), 0.0, 0
    for second in range(1800):
        now, minute = float(second), second // 60
        for prompt in range(4):
            key = digest(tokens(minute, prompt))
            for client in range(4):
                text = rng.integers(100, size=8).astype(np.int32)
                groups.append(key, client, minute, minute // 3, 8 * (second % 60), text, now)
        groups.expire(now)
        most = max(most, groups.nbytes / groups.num_tokens)
        longest = max(longest, len(groups))
    assert groups.evicted == 0 and groups.expired == 4 * 30 - len(groups)
    assert longest <= 4 * (300 // 60 + 2)  # those of the time to live, of this minute and the last
    assert groups.num_tokens <= longest * 4 * 480
    # Entries of 8 tokens: 4 bytes a token, an entry's share of 2, an eighth more, and a group's own share.
    assert most < 80 and groups.nbytes / groups.num_tokens < 9
    groups.expire(1800.0 + 301.0)
    assert (len(groups), groups.nbytes, groups.num_tokens, groups._by_version) == (0, 0, 0, {})
