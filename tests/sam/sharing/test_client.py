"""The thread's work, called here by hand: what it does when the log is down, frozen, new or full."""

import logging

import numpy as np
import pytest

from sam.drafting.texts import digest
from sam.sharing import client as module
from sam.sharing.log import PIECE_TOKENS, Log
from tests.sam.sharing.channel import Channel, make_client
from tests.sam.stepping import tokens

KEYS = [digest(tokens(i)) for i in range(8)]


def write(client, slot, position, *text):
    client.put("append", np.array([slot]), np.array([position]), tokens(*text), np.array([0, len(text)]))


def texts(client):
    """What has arrived since the last call, one response after the other."""
    found = {}
    for piece in sum(client.parts, []):
        found.setdefault((piece.key, piece.name), []).extend(piece.tokens.tolist())
    client.parts.clear()
    return sum(found.values(), [])


def advance(channel, *clients, rounds=1):
    """What the threads do, every 0.05 seconds."""
    for _ in range(rounds):
        channel.now += 0.05
        for one in clients:
            one.exchange()


@pytest.fixture
def channel():
    return Channel()


@pytest.fixture
def pair(channel):
    clients = [make_client(channel) for _ in range(2)]
    for one in clients:
        one.put("start", 0, KEYS[0], 2)
    return clients


def test_text_arrives_with_the_next_exchange_where_a_request_has_its_prompt_and_late_ones_get_all(channel, pair):
    late = make_client(channel)
    write(pair[0], 0, 2, 5, 6)
    advance(channel, *pair, late)
    assert texts(pair[1]) == [5, 6] and texts(pair[0]) == texts(late) == []
    assert pair[1].counters["sharing_received_tokens"] == pair[0].counters["sharing_sent_tokens"] == 2
    assert pair[0].counters["sharing_errors"] == pair[0].counters["sharing_lost_tokens"] == 0
    pair[0].put("finish", 0)
    for _ in range(2):  # the drafter may drop the group, and begin it anew
        late.put("start", 1, KEYS[0], 2)
        advance(channel, late)
        assert texts(late) == [5, 6]
        late.put("finish", 1)
        late.put("forget", KEYS[0])


@pytest.mark.parametrize("kind", ["no answers", "answers are lost", "then another log"])
def test_an_outage_is_warned_of_once_seldom_asked_about_and_caught_up(channel, pair, kind, caplog):
    write(pair[0], 0, 2, 0)
    advance(channel, *pair)
    channel.failure, channel.loses_answers, asked = OSError(), kind == "answers are lost", channel.asked
    caplog.set_level(logging.WARNING)
    for i in range(1, 1200):  # a minute
        write(pair[0], 0, 2 + i, i % 10)
        advance(channel, *pair)
    assert len(caplog.records) == 2 and "drafting goes on without it" in caplog.text  # one for each client
    assert channel.asked - asked <= 2 * (60 / module.RETRY_SECONDS + 1)
    channel.failure = None
    if kind == "then another log":
        channel.log = Log(1 << 24)
    advance(channel, *pair, rounds=int(2 * module.RETRY_SECONDS / 0.05))
    pair.append(make_client(channel))
    pair[2].put("start", 0, KEYS[0], 2)
    advance(channel, *pair)
    assert texts(pair[1]) == texts(pair[2]) == [i % 10 for i in range(1200)], "all of it, and nothing twice"
    assert pair[0].counters["sharing_errors"] >= 5


def test_the_engines_thread_never_asks_and_text_beyond_what_may_wait_is_lost_and_counted(channel, pair, monkeypatch):
    monkeypatch.setattr(module, "MAX_ENDED_TOKENS", 10)
    for slot in range(1, 9):
        pair[0].put("start", slot, KEYS[0], 0)
        write(pair[0], slot, 0, *[slot] * 4)
        pair[0].put("finish", slot)
    advance(channel, *pair)
    assert texts(pair[1]) == [7] * 4 + [8] * 4 and pair[0].counters["sharing_lost_tokens"] == 24
    monkeypatch.setattr(module, "MAX_EVENTS", 10)
    asked = channel.asked
    for i in range(50):  # nobody calls exchange
        write(pair[0], 0, 2 + i, i)
    assert channel.asked == asked
    advance(channel, *pair)
    assert texts(pair[1]) == list(range(10)) and pair[0].counters["sharing_lost_tokens"] == 24 + 40


def test_what_is_sent_and_handed_over_at_once_is_bounded_and_what_cannot_be_taken_fails_nothing(
    channel, pair, monkeypatch, caplog
):
    monkeypatch.setattr(module.log, "MAX_INTEGERS", 4 * PIECE_TOKENS)
    write(pair[0], 0, 2, *range(10 * PIECE_TOKENS + 5))
    advance(channel, *pair)
    assert 0 < pair[1].counters["sharing_received_tokens"] < 4 * PIECE_TOKENS, "the rest follows"
    advance(channel, *pair, rounds=5)
    assert max(sum(len(piece.tokens) for piece in part) for part in pair[1].parts) < 2 * PIECE_TOKENS
    assert texts(pair[1]) == list(range(10 * PIECE_TOKENS + 5))

    def refuse(part):
        raise MemoryError("no room")

    pair[1].receive = refuse
    write(pair[0], 0, 2 + 10 * PIECE_TOKENS + 5, 5, 6)
    caplog.set_level(logging.WARNING)
    advance(channel, *pair, rounds=3)
    assert pair[1].counters["sharing_errors"] == len(caplog.records) == 1


@pytest.mark.parametrize("seed", range(3))
def test_whatever_fails_what_arrives_is_a_begin_of_what_was_written(channel, seed):
    """Random schedules of requests, outages, lost answers, new logs and full ones."""
    rng, clients = np.random.default_rng(seed), [make_client(channel) for _ in range(3)]
    written, arrived, slots = [], [{} for _ in clients], [[] for _ in clients]
    for _ in range(2000):
        which = int(rng.integers(3))
        client, mine, choice = clients[which], slots[which], int(rng.integers(12))
        if choice == 0:
            client.put("start", len(written), KEYS[rng.integers(3)], 2)
            mine.append(len(written))
            written.append([])
        elif choice == 1 and len(mine) > 1:
            client.put("finish", mine.pop(0))
        elif choice == 2:
            channel.failure = ConnectionError() if rng.random() < 0.3 else None
            channel.loses_answers = rng.random() < 0.5
        elif choice == 3 and rng.random() < 0.2:
            channel.log = Log(int(rng.integers(2_000, 100_000)))
        elif choice < 8:
            for slot in mine:  # tokens say whose they are, and where they stand
                begin = len(written[slot])
                text = [slot * 1000 + begin + i for i in range(int(rng.integers(4)))]
                write(client, slot, 2 + begin, *text)
                written[slot] += text
        else:
            channel.now += 2.0
            client.exchange()
            for piece in sum(client.parts, []):
                text = arrived[which].setdefault(piece.name, [])
                assert piece.position == len(text)
                text.extend(piece.tokens.tolist())
            client.parts.clear()
    found = [text for its in arrived for text in its.values()]
    assert len(found) > 20
    assert all(written[text[0] // 1000][: len(text)] == text for text in found)
