"""The thread's work, called here by hand: what it does when shards are down, frozen, full or of another run."""

import logging
import threading
import time

import numpy as np
import pytest

from sam.drafting.token_ids import digest
from sam.sharing import client as module
from sam.sharing.messages import shard_of
from tests.sam.sharing.channel import Channel, Clock, make_client, make_groups, tokens

KEYS = [digest(tokens(i)) for i in range(8)]


def write(client, slot, position, *text):
    client.put("append", np.array([slot]), np.array([position]), tokens(*text), np.array([0, len(text)]))


def texts(client):
    """What has arrived, and not been asked for before."""
    found = [part.tokens.tolist() for part in client.parts]
    client.parts.clear()
    return found


@pytest.fixture
def channel():
    return Channel([make_groups()], Clock())


@pytest.fixture
def pair(channel):
    clients = [make_client(channel) for _ in range(2)]
    for one in clients:
        one.put("start", 0, KEYS[0], 0, 2)
    return clients


def step(client):
    """An engine step without a token."""
    write(client, 0, 0)


def advance(channel, *clients, seconds=0.05, rounds=1):
    for _ in range(rounds):
        channel.clock.now += seconds
        for one in clients:
            step(one)
            one.exchange()


def test_text_arrives_with_the_next_exchange_and_is_counted(channel, pair):
    write(pair[0], 0, 2, 5, 6)
    advance(channel, pair[0])
    channel.between = lambda: setattr(channel.clock, "now", channel.clock.now + 0.03)
    advance(channel, pair[1])
    assert texts(pair[1]) == [[5, 6]] and texts(pair[0]) == []
    counters = pair[1].counters
    assert counters["sharing_received_tokens"] == 2 and counters["sharing_lag_ms"] == pytest.approx(30, abs=0.1)
    assert pair[0].counters["sharing_sent_tokens"] == 2 and pair[0].counters["sharing_bytes"] > 0
    assert not any(counters[name] for name in ("sharing_errors", "sharing_reconnects", "sharing_lost_tokens"))


def test_one_question_a_shard_and_exchange_however_much_there_is_to_say(channel, pair):
    for i in range(500):
        write(pair[0], 0, 2 + i, 7)
    advance(channel, pair[0])
    assert channel.asked == 1 and channel.groups[0].num_tokens == 500


@pytest.mark.parametrize("failure", ["is_down", "is_frozen"])
def test_an_outage_is_warned_of_once_asked_about_ever_less_and_caught_up(channel, pair, failure, caplog):
    advance(channel, *pair)
    setattr(channel, failure, True)
    asked = channel.asked
    with caplog.at_level(logging.WARNING):
        for i in range(1200):  # a minute
            write(pair[0], 0, 2 + i, i % 10)
            advance(channel, *pair)
    assert len(caplog.records) == 2  # one for each client
    assert channel.asked - asked <= 2 * 2 * 60 / module.LONGEST_PAUSE + 30
    setattr(channel, failure, False)
    advance(channel, *pair, rounds=int(10 / 0.05))
    assert sum(texts(pair[1]), []) == [i % 10 for i in range(1200)]
    assert pair[0].counters["sharing_errors"] >= 5 and pair[0].counters["sharing_reconnects"] == 1


def test_a_shard_that_was_killed_gets_everything_again(channel, pair):
    write(pair[0], 0, 2, 5, 6)
    advance(channel, *pair)
    channel.groups[0] = make_groups()
    write(pair[0], 0, 4, 7)
    advance(channel, *pair, rounds=3)
    late = make_client(channel)
    late.put("start", 0, KEYS[0], 0, 2)
    advance(channel, *pair, late, rounds=3)
    assert sum(texts(pair[1]), []) == [5, 6, 7] == sum(texts(late), [])


def test_a_client_without_a_server_starts_when_there_is_one(channel):
    channel.is_down = True
    client = make_client(channel)
    client.put("start", 0, KEYS[0], 0, 0)
    write(client, 0, 0, 1, 2)
    advance(channel, client, rounds=100)
    assert 3 <= channel.connects <= 10 and client.counters["sharing_errors"] == channel.connects
    channel.is_down = False
    advance(channel, client, rounds=200)
    assert channel.groups[0].num_tokens == 2


def test_clocks_that_differ_by_years_change_nothing(channel):
    """No time travels: each process asks its own clock for its own pauses only."""
    year = 365 * 24 * 3600.0
    clients = [make_client(channel) for _ in range(3)]
    for shift, one in zip((-30 * year, 0.0, 30 * year), clients, strict=True):
        one._clock = lambda shift=shift: channel.clock() + shift
        one.put("start", 0, KEYS[0], 0, 2)
    exchange = channel.groups[0].exchange
    channel.groups[0].exchange = lambda message, now: exchange(message, now - 7 * year)
    for i, one in enumerate(clients):
        write(one, 0, 2, i)
    advance(channel, *clients, rounds=2)
    assert [sorted(sum(texts(one), [])) for one in clients] == [[1, 2], [0, 2], [0, 1]]
    assert len(channel.groups[0]) == 1 and channel.groups[0].expired == 0
    assert all(0 <= one.counters["sharing_lag_ms"] <= 100 and one.counters["sharing_errors"] == 0 for one in clients)


def test_a_shard_of_another_run_gets_nothing(channel):
    client = make_client(channel, run_id="other")
    client.put("start", 0, KEYS[0], 0, 0)
    write(client, 0, 0, 1, 2)
    advance(channel, client, rounds=20)
    assert len(channel.groups[0]) == 0 and client.counters["sharing_errors"] >= 2


def test_a_full_shard_is_asked_less_often_and_gets_the_text_when_it_has_memory(channel, pair):
    channel.groups[0].budget_bytes = 0
    write(pair[0], 0, 2, 5, 6)
    advance(channel, *pair, rounds=400)
    assert 1 < pair[0].counters["sharing_full_replies"] <= 15 and pair[0].counters["sharing_errors"] == 0
    channel.groups[0].budget_bytes = 1 << 20
    advance(channel, *pair, rounds=200)
    assert texts(pair[1]) == [[5, 6]]


def test_one_frozen_shard_does_not_hold_up_the_others():
    channel = Channel([make_groups(), make_groups()], Clock())
    clients = [make_client(channel) for _ in range(2)]
    ask = channel.ask
    frozen, _ = channel.groups

    def freeze_one(shard, message):
        channel.is_frozen = channel.groups[shard] is frozen
        return ask(shard, message)

    channel.ask = freeze_one
    for slot, key in enumerate(KEYS):
        for one in clients:
            one.put("start", slot, key, 0, 0)
        write(clients[0], slot, 0, slot)
    advance(channel, *clients, rounds=2)
    arrived = sorted(sum(texts(clients[1]), []))
    assert arrived == [slot for slot, key in enumerate(KEYS) if shard_of(key, 2) == 1] != []


def test_the_engines_thread_never_waits_for_the_client_and_loses_text_when_it_hangs(channel, monkeypatch):
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    client = make_client(channel)  # nobody calls exchange
    client.put("start", 0, KEYS[0], 0, 0)
    for i in range(50):
        write(client, 0, i, 1)
    client.put("finish", 0)
    assert channel.waits == channel.asked == 0 and len(client._events) == 11
    client.exchange()
    assert channel.groups[0].num_tokens == 9 and client.counters["sharing_lost_tokens"] == 41


def test_what_is_handed_over_at_once_is_bounded(channel, pair):
    write(pair[0], 0, 2, *range(10 * module.PART_TOKENS))
    advance(channel, *pair)
    assert [len(part.tokens) for part in pair[1].parts] == [module.PART_TOKENS] * 10


def test_text_that_cannot_be_taken_is_counted_and_fails_nothing(channel, pair, caplog):
    def refuse(part):
        raise MemoryError("no room")

    pair[1].receive = refuse
    write(pair[0], 0, 2, 5, 6)
    with caplog.at_level(logging.WARNING):
        advance(channel, *pair, rounds=3)
    assert pair[1].counters["sharing_errors"] == len(caplog.records) == 1
    pair[1].receive = pair[1].parts.append
    write(pair[0], 0, 4, 7)
    advance(channel, *pair)
    assert texts(pair[1]) == [[7]]


def test_between_rollouts_nothing_is_asked_for_and_what_was_written_still_leaves(channel, pair):
    advance(channel, *pair)
    write(pair[0], 0, 2, 5, 6)
    asked = channel.asked
    for _ in range(1200):  # a minute
        channel.clock.now += 0.05
        for one in pair:
            one.exchange()
    assert channel.asked - asked <= 2 * (module.REST_SECONDS / 0.05 + 2) and channel.groups[0].num_tokens == 2
    taken = sum(texts(pair[1]), [])
    write(pair[0], 0, 4, 7)
    advance(channel, *pair, rounds=2)
    assert taken + sum(texts(pair[1]), []) == [5, 6, 7]


def test_the_thread_exchanges_until_it_is_stopped(channel):
    seen, client = threading.Event(), make_client(channel)
    exchange = channel.groups[0].exchange

    def notice(message, now):
        seen.set()
        time.sleep(0.2)
        return exchange(message, now)

    channel.groups[0].exchange = notice
    client.put("start", 0, KEYS[0], 0, 0)
    client.start()
    assert seen.wait(60)
    client.stop()
    assert not client._thread.is_alive(), "the question under way has its answer: the shard may end now"
    assert client._links[0].answer is None and client.counters["sharing_errors"] == 0
