"""Real Ray: shards are killed and frozen, clients are killed, two runs share a cluster. No engine ever waits.

Nothing here asserts how long something takes: `until` gives up after a minute.
"""

import itertools
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from sam.sharing.client import Client
from sam.sharing.messages import nothing
from sam.sharing.packing import pack
from sam.sharing.relay import RelayTransport
from sam.sharing.shard import namespace, start_shards
from tests.sam.sharing.engines import Engine, relays_of, until

pytestmark = pytest.mark.engine
ray = pytest.importorskip("ray")
PROMPT = [1, 2]
FRESH = itertools.count(10_000)  # tokens that say nothing: each comes once


@pytest.fixture
def engines(shards):
    both = [Engine(shards[0]) for _ in range(2)]
    for name, engine in zip("ab", both, strict=True):
        engine.ask("start", name, PROMPT)
    yield both
    for engine in both:
        engine.kill()


def wait_for_text(engine, name, total):
    """Until the engine has appended `total` tokens from elsewhere, taking steps with tokens that say nothing."""

    def arrived():
        engine.ask("step", name, [next(FRESH)])
        return engine.ask("counters")["sharing_received_tokens"] >= total

    until(arrived)


def test_text_arrives_from_another_process(shards, engines):
    writer, reader = engines
    writer.ask("step", "a", [10, 11, 12, 13, 14])
    wait_for_text(reader, "b", 5)
    assert reader.ask("step", "b", [10]) == [11, 12, 13]
    counters = reader.ask("counters")
    assert (counters["sharing_received_tokens"], counters["sharing_errors"]) == (5, 0)
    assert ray.get(shards[1].state.remote())["groups"] == 1


@pytest.mark.parametrize("failure", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
def test_a_shard_that_fails_delays_text_and_nothing_else(shards, engines, failure):
    writer, reader = engines
    writer.ask("step", "a", [10, 11, 12, 13, 14])
    wait_for_text(reader, "b", 5)
    pid = ray.get(shards[1].state.remote())["pid"]
    os.kill(pid, failure)
    # Both go on while there is no shard: every step answers, and drafts are of tokens that are known.
    for _ in range(50):
        draft = reader.ask("step", "b", [10, next(FRESH)])
        assert all(token in (1, 2, *range(10, 15)) or token >= 10_000 for token in draft)
        writer.ask("step", "a", [20, 21, 22, 23])
    if failure == signal.SIGSTOP:
        until(lambda: reader.ask("counters")["sharing_errors"] > 0)
        os.kill(pid, signal.SIGCONT)
    wait_for_text(reader, "b", 5 + 200)
    assert reader.ask("counters")["sharing_received_tokens"] == 5 + 200  # all of it, and nothing twice
    assert reader.ask("step", "b", [20]) == [21, 22, 23]
    assert (ray.get(shards[1].state.remote())["pid"] != pid) == (failure == signal.SIGKILL)


def test_a_killed_relay_is_replaced_and_the_engine_goes_on(shards, engines):
    writer, reader = engines
    writer.ask("step", "a", [10, 11, 12, 13, 14])
    wait_for_text(reader, "b", 5)
    (relay,) = relays_of(shards[0])  # one for both
    os.kill(relay, signal.SIGKILL)
    for _ in range(20):
        assert isinstance(reader.ask("step", "b", [10, next(FRESH)]), list)
        writer.ask("step", "a", [20, 21, 22, 23])
    wait_for_text(reader, "b", 5 + 80)
    counters = reader.ask("counters")
    assert counters["sharing_received_tokens"] == 5 + 80 and counters["sharing_errors"] > 0
    assert reader.ask("step", "b", [20]) == [21, 22, 23]


def test_beside_a_frozen_relay_engines_go_on_and_catch_up(shards, engines):
    writer, reader = engines
    writer.ask("step", "a", [10, 11, 12, 13, 14])
    wait_for_text(reader, "b", 5)
    (relay,) = relays_of(shards[0])
    os.kill(relay, signal.SIGSTOP)
    try:

        def given_up():
            assert isinstance(reader.ask("step", "b", [10, next(FRESH)]), list)
            written.append(writer.ask("step", "a", [next(FRESH)]))
            return all(engine.ask("counters")["sharing_errors"] for engine in engines)

        written: list = []
        until(given_up)
        assert len(written) > 5  # steps until a question is given up: none of them waited for its answer
        writer.ask("step", "a", [20, 21, 22, 23])
    finally:
        os.kill(relay, signal.SIGCONT)
    wait_for_text(reader, "b", 5 + len(written) + 4)
    assert reader.ask("step", "b", [20]) == [21, 22, 23]
    assert relays_of(shards[0]) == [relay]


@pytest.mark.parametrize("is_whole", [False, True], ids=["engine", "replica"])
def test_a_killed_engine_takes_nothing_with_it(shards, engines, is_whole):
    writer, reader = engines
    writer.ask("step", "a", [10, 11, 12, 13, 14])
    until(lambda: ray.get(shards[1].state.remote())["tokens"] == 5)
    if is_whole:  # the process beside it too, at the same time
        (relay,) = relays_of(shards[0])
        os.kill(relay, signal.SIGKILL)
    writer.kill()
    wait_for_text(reader, "b", 5)
    again = Engine(shards[0])
    again.ask("start", "a", PROMPT)
    again.ask("step", "a", [30, 31, 32, 33])
    wait_for_text(reader, "b", 5 + 4)
    wait_for_text(again, "a", 5)
    assert again.ask("step", "a", [10]) == [11, 12, 13]
    again.kill()


@pytest.mark.parametrize("is_told", [True, False], ids=["at_the_end", "midway"])
def test_a_shard_that_ends_is_an_error_unless_the_engine_was_told(cluster, request, is_told):
    where, handles = start_shards(1, request.node.name, 1 << 24)
    told, other = (Engine(where) for _ in range(2))
    for name, engine in (("a", told), ("b", other)):
        engine.ask("start", name, PROMPT)
    told.ask("step", "a", [10, 11])
    wait_for_text(other, "b", 2)
    if is_told:
        told.ask("stop")
    ray.kill(handles[0])  # for good, as at the end of a run

    def noticed():
        for name, engine in (("a", told), ("b", other)):
            engine.ask("step", name, [next(FRESH)])
        return other.ask("counters")["sharing_errors"]

    until(noticed)
    time.sleep(1.0)  # in which the first asks ten times, unless it was told
    assert bool(told.ask("counters")["sharing_errors"]) is not is_told
    for engine in (told, other):
        engine.kill()


def test_a_full_shard_costs_text_and_nothing_else(cluster, request):
    where, handles = start_shards(1, request.node.name, 3000)
    both = [Engine(where) for _ in range(2)]
    for name, engine in zip("ab", both, strict=True):
        engine.ask("start", name, PROMPT)
    for _ in range(50):
        for name, engine in zip("ab", both, strict=True):
            assert isinstance(engine.ask("step", name, range(100)), list)
    until(lambda: both[0].ask("counters")["sharing_full_replies"] + both[1].ask("counters")["sharing_full_replies"])
    state = ray.get(handles[0].state.remote())
    assert state["bytes"] <= 3000
    for engine in both:
        assert engine.ask("counters")["sharing_errors"] == 0
        engine.kill()
    ray.kill(handles[0])


def test_two_runs_in_one_cluster_do_not_meet(shards):
    other, handles = start_shards(1, "another-run", 1 << 24)
    transport = RelayTransport(shards[0])
    stranger = Client(lambda: RelayTransport(other), shards[0].run_id, 1, 0.02).view
    stranger.start(0, bytes(16), 0, 0)
    message = stranger.message(0)
    refused, empty = ray.get(handles[0].exchange.remote([pack(message), pack(nothing("another-run"))]))
    assert "WrongRunError" in refused and "refused" in refused
    assert isinstance(empty, bytes)
    answer = transport.ask(0, message)
    (ready,) = transport.wait([answer], 60)
    assert transport.take(ready).have.tolist() == []
    assert namespace(other.run_id) != namespace(shards[0].run_id)
    ray.kill(handles[0])


def test_engines_that_start_at_once_start_one_relay_which_ends_with_the_last(shards):
    with ThreadPoolExecutor(8) as pool:
        transports = list(pool.map(lambda _: RelayTransport(shards[0]), range(8)))
        answers = [transport.ask(0, nothing(shards[0].run_id)) for transport in transports]
        for transport, answer in zip(transports, answers, strict=True):
            assert transport.wait([answer], 60) == [answer]
            assert transport.take(answer).incarnation
    assert len(relays_of(shards[0])) == 1
    calls = ray.get(shards[1].state.remote())["calls"]
    assert calls < 1 + 8  # a greeting, and what eight engines asked while the relay joined Ray
    del transport, transports
    until(lambda: not relays_of(shards[0]))
