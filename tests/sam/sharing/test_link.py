"""The way to the log, without Ray: a server in a thread of this process, and engines that are sockets."""

import os
import secrets

import pytest

from sam.sharing import link as module
from sam.sharing.link import Link, address_of
from tests.sam.sharing.server import Server


def backwards(question):
    return question[::-1]


@pytest.fixture
def address():
    return address_of(secrets.token_hex(8), 0)


@pytest.fixture
def server(address):
    made = Server(address, backwards)
    yield made
    made.end()


def test_questions_of_any_length_are_answered_in_turn_and_an_engine_that_goes_takes_nothing_with_it(server, address):
    first, second = Link(address), Link(address)
    for question in (b"", b"ab", bytes(range(256)) * 5000):
        assert first.ask(question) == second.ask(question) == question[::-1]
    del first
    assert second.ask(b"ab") == b"ba"


def test_a_log_that_fails_or_hangs_and_a_server_that_ends_are_errors_until_there_is_another(address, monkeypatch):
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)

    def fail(question):
        raise RuntimeError("the actor died")

    engine, server = Link(address), Server(address, backwards)
    for answer, why in ((fail, "RuntimeError.*the actor died"), (None, "TimeoutError")):
        server.answer = answer
        with pytest.raises(OSError, match=f"the log does not answer: {why}"):
            engine.ask(b"a")
        server.answer = backwards
        assert engine.ask(b"ab") == b"ba"
    server.end()
    for _ in range(2):
        with pytest.raises(OSError):
            engine.ask(b"ab")
    server = Server(address, backwards)
    assert engine.ask(b"ab") == b"ba"
    server.end()


def test_another_user_is_refused(server, address, monkeypatch):
    user = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, expected {user + 1}"):
        Link(address).ask(b"a")
