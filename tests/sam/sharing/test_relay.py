"""The relay without Ray: in this process, with engines that are sockets."""

import asyncio
import os
import socket
import threading
import time

import numpy as np
import pytest

from sam.sharing import relay as module
from sam.sharing.messages import Message, nothing
from sam.sharing.packing import pack, unpack
from sam.sharing.relay import Relay, RelayTransport
from sam.sharing.shard import Cluster
from tests.sam.sharing.channel import make_groups
from tests.sam.sharing.engines import until


class Shards:
    """Two shards that answer at once, and remember what they were asked."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.groups, self.calls = [make_groups(), make_groups()], []
        self.failure, self.delay, self.frozen = None, 0.0, set()

    async def __call__(self, shard, messages):
        self.calls.append((shard, len(messages)))
        await asyncio.sleep(60.0 if shard in self.frozen else self.delay)
        if self.failure:
            raise self.failure
        return [self._answer(shard, unpack(Message, message)) for message in messages]

    def _answer(self, shard, message):
        return "WrongRunError: refused" if message.client == 13 else pack(self.groups[shard].exchange(message, 0.0))


@pytest.fixture
def shards(monkeypatch, request):
    """A relay is a thread: one for each that would be started."""
    made, threads = Shards(Cluster("no address", request.node.name, 2)), []

    def start(command, pass_fds, **options):
        door = socket.socket(fileno=os.dup(pass_fds[0]))
        threads.append(threading.Thread(target=lambda: asyncio.run(Relay(made).serve(door)), daemon=True))
        threads[-1].start()

    monkeypatch.setattr(module.subprocess, "Popen", start)
    monkeypatch.setattr(module, "LINGER_SECONDS", 0.1)
    made.relays = threads
    return made


def message_of(client=1, tokens=()):
    """A response's tokens, of a group of their own."""
    counts = np.zeros(1, np.int32)
    columns = [counts.copy() for _ in range(4)]
    return nothing(make_groups().run_id)._replace(
        client=client,
        keys=bytes(16),
        since=np.array([-1]),
        known=counts,
        groups=columns[0],
        requests=columns[1],
        versions=columns[2],
        positions=columns[3],
        offsets=np.array([0, len(tokens)]),
        tokens=np.array(tokens, np.int32),
    )


def answers_of(transports, shard=0, message=None):
    """Each transport's answer, or the error that came instead."""
    message = message or nothing(make_groups().run_id)
    asked = [transport.ask(shard, message) for transport in transports]
    found = []
    for transport, number in zip(transports, asked, strict=True):
        assert transport.wait([number], 30.0) == [number]
        try:
            found.append(transport.take(number))
        except Exception as error:
            found.append(error)
    return found


def test_what_several_engines_ask_leaves_in_few_calls_which_do_not_wait_for_each_other(shards, monkeypatch):
    monkeypatch.setattr(module, "GATHER_SECONDS", 0.5)
    engines = [RelayTransport(shards.cluster) for _ in range(8)]
    assert all(reply.incarnation for reply in answers_of(engines))
    assert len(shards.relays) == 1
    assert sorted(count for _, count in shards.calls) == [2, module.MAX_QUESTIONS, module.MAX_QUESTIONS]
    shards.frozen.add(0)
    frozen = engines[0].ask(0, nothing(make_groups().run_id))
    until(lambda: len(shards.calls) == 4)
    shards.frozen.clear()
    assert answers_of(engines[1:])[0].incarnation and engines[0].wait([frozen], 0.0) == []


def test_shards_do_not_wait_for_each_other(shards):
    engine = RelayTransport(shards.cluster)
    shards.frozen.add(0)
    asked = [engine.ask(shard, nothing(make_groups().run_id)) for shard in (0, 1)]
    assert engine.wait(asked, 30.0) == asked[1:]
    assert engine.take(asked[1]).incarnation


def test_a_long_message_arrives_whole(shards):
    tokens = np.arange(1 << 16) % 1000
    (reply,) = answers_of([RelayTransport(shards.cluster)], message=message_of(tokens=tokens))
    assert reply.have.tolist() == [1 << 16]
    assert shards.groups[0].num_tokens == 1 << 16


def test_one_engine_is_refused_and_the_others_are_answered(shards):
    shards.delay = 0.1
    good, bad = RelayTransport(shards.cluster), RelayTransport(shards.cluster)
    asked = good.ask(0, nothing(make_groups().run_id)), bad.ask(0, message_of(client=13))
    assert good.wait([asked[0]], 30.0) and bad.wait([asked[1]], 30.0)
    assert good.take(asked[0]).incarnation
    with pytest.raises(RuntimeError, match="WrongRunError: refused"):
        bad.take(asked[1])


def test_a_call_that_fails_is_an_error_for_all_who_asked(shards):
    engines = [RelayTransport(shards.cluster) for _ in range(3)]
    shards.failure = OSError("no shard")
    assert [str(error) for error in answers_of(engines)] == ["OSError: no shard"] * 3
    shards.failure = None
    assert all(reply.incarnation for reply in answers_of(engines))


def test_a_call_without_an_answer_is_given_up_and_the_next_one_is_made(shards, monkeypatch):
    monkeypatch.setattr(module, "SILENT_SECONDS", 0.2)
    engine = RelayTransport(shards.cluster)
    shards.frozen.add(0)
    assert "TimeoutError" in str(answers_of([engine])[0])
    shards.frozen.clear()
    assert answers_of([engine])[0].incarnation


def test_an_engine_that_goes_with_a_question_takes_nothing_with_it(shards):
    shards.delay = 0.2
    gone, other = RelayTransport(shards.cluster), RelayTransport(shards.cluster)
    gone.ask(0, nothing(make_groups().run_id))
    gone._socket.close()
    assert answers_of([other])[0].incarnation and answers_of([other])[0].incarnation


def test_a_relay_ends_with_its_last_engine_and_another_is_started(shards):
    engine = RelayTransport(shards.cluster)
    assert answers_of([engine])[0].incarnation
    engine._socket.shutdown(socket.SHUT_RDWR)
    shards.relays[0].join(30.0)
    assert not shards.relays[0].is_alive()
    with pytest.raises(ConnectionError, match="the relay to Ray has ended"):
        engine.ask(0, nothing(make_groups().run_id))
    assert answers_of([engine])[0].incarnation
    assert len(shards.relays) == 2


def test_a_relay_that_ends_while_an_answer_is_awaited_is_an_error(shards):
    shards.frozen.add(0)
    engine = RelayTransport(shards.cluster)
    number = engine.ask(0, nothing(make_groups().run_id))
    threading.Timer(0.1, lambda: engine._socket.shutdown(socket.SHUT_RDWR)).start()
    assert engine.wait([number], 30.0) == [number]
    with pytest.raises(ConnectionError, match="the relay to Ray has ended"):
        engine.take(number)


def test_a_socket_of_another_user_is_refused(shards, monkeypatch):
    engine = RelayTransport(shards.cluster)
    user = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, expected {user + 1}"):
        module._check_owner(engine._socket)


def test_an_answer_to_a_forgotten_question_is_dropped(shards):
    engine = RelayTransport(shards.cluster)
    shards.delay = 0.2
    first = engine.ask(0, nothing(make_groups().run_id))
    second = engine.ask(0, nothing(make_groups().run_id))
    assert engine.wait([first], 0.0) == []
    assert engine.wait([second], 30.0) == [second]
    deadline = time.monotonic() + 0.5
    assert engine.wait([first], deadline - time.monotonic()) == []
