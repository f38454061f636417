"""The way to the log, without Ray: a server in a thread of this process, and engines that are sockets."""

import asyncio
import os
import secrets
import threading

import pytest

from sam.sharing import link as module
from sam.sharing.link import Link, address_of, serve


class Server:
    """Answers questions backwards; with `fails` raises it, or never answers if it is None."""

    def __init__(self, address):
        self.fails, self._loop = (), asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._server = self._run(serve(address, self._ask))

    def _run(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(300)

    async def _ask(self, question):
        if self.fails is None:
            await asyncio.sleep(600)
        if self.fails:
            raise self.fails
        return question[::-1]

    def end(self):
        """As if its process ended."""

        async def close():
            self._server.close()
            for task in (tasks := asyncio.all_tasks() - {asyncio.current_task()}):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        self._run(close())
        self._loop.call_soon_threadsafe(self._loop.stop)


def test_questions_are_answered_whatever_becomes_of_engines_of_the_log_and_of_the_server(monkeypatch):
    address = address_of(secrets.token_hex(8), 0)
    server, first, engine = Server(address), Link(address), Link(address)
    for question in (b"", b"ab", bytes(range(256)) * 5000):
        assert first.ask(question) == engine.ask(question) == question[::-1]
    del first
    monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    for fails, why in ((RuntimeError("the actor died"), "RuntimeError.*the actor died"), (None, "TimeoutError")):
        server.fails = fails
        with pytest.raises(OSError, match=f"the log does not answer: {why}"):
            engine.ask(b"a")
        server.fails = ()
        assert engine.ask(b"ab") == b"ba"
    server.end()
    for _ in range(2):
        with pytest.raises(OSError):
            engine.ask(b"ab")
    server = Server(address)
    assert engine.ask(b"ab") == b"ba"
    user = os.getuid()
    monkeypatch.setattr(module.os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError, match=f"belongs to user {user}, expected {user + 1}"):
        Link(address).ask(b"a")
    server.end()
