"""The way from an engine to the shards: a process beside the engine, which alone has joined Ray.

Ray's core ends the process that it runs in where a check of its own fails. Seen with Ray 2.60 where two engines that
were forked from one process joined at once (`WarmupStore() ... Seal() called on an object without a reference to it`).
An engine has to outlive that: its relay dies, and the next question starts another.
"""

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection

from sam.sharing.messages import Message, Reply
from sam.sharing.packing import pack, unpack
from sam.sharing.shard import Cluster, RayTransport

ENDED = "the relay to Ray has ended"


class RelayTransport:
    """Questions to shards through a relay, started anew where it has ended."""

    def __init__(self, cluster: Cluster):
        self._cluster, self._numbers = cluster, itertools.count()
        self._asked: dict[int, int] = {}  # the last question's number, by shard
        self._answers: dict[int, bytes | Exception] = {}
        self._start()

    def _start(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            command = [sys.executable, "-m", "sam.sharing.relay", str(theirs.fileno()), *map(str, self._cluster)]
            self.process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)

    def ask(self, shard: int, message: Message) -> int:
        """Send a question; its answer may be an error. An unanswered one to the same shard is forgotten.

        Raises ConnectionError where the relay has ended, so that this is counted; the next question finds another.
        """
        if self.process.poll() is not None:
            self._pipe.close()
            self._start()
            self._answers = dict.fromkeys(self._asked.values(), ConnectionError(ENDED))
            raise ConnectionError(ENDED)
        number = self._asked[shard] = next(self._numbers)
        self._answers = {asked: answer for asked, answer in self._answers.items() if asked in self._asked.values()}
        self._pipe.send((number, shard, pack(message)))
        return number

    def wait(self, pending: list[int], seconds: float) -> list[int]:
        """Those of `pending` that are answered within `seconds`; all, with errors, if the relay has ended."""
        deadline = time.monotonic() + seconds
        while not (ready := [number for number in pending if number in self._answers]):
            try:
                if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
                    return []
                number, answer = self._pipe.recv()
            except (EOFError, OSError):
                self._answers.update(dict.fromkeys(pending, ConnectionError(ENDED)))
                return pending
            if number in self._asked.values():
                self._answers[number] = answer
        return ready

    def take(self, answer: int) -> Reply:
        """The answer that `wait` gave; raises what came instead."""
        reply = self._answers.pop(answer)
        if isinstance(reply, Exception):
            raise reply
        return unpack(Reply, reply)


def serve(pipe: Connection, transport: RayTransport) -> None:
    """Pass on questions and answers until the engine has closed its end of the pipe.

    Nothing is asked over and over: an answer is sent by the thread of Ray's core in which it arrives.
    """
    sending = threading.Lock()

    def send(number: int, answer: bytes | Exception) -> None:
        with sending, contextlib.suppress(OSError):  # the engine has ended: the next question that is read says so
            pipe.send((number, answer))

    while True:
        try:
            number, shard, message = pipe.recv()
        except EOFError:
            return
        try:
            future = transport.ask_packed(shard, message).future()
        except Exception as error:
            send(number, _portable(error))
        else:
            future.add_done_callback(lambda done, number=number: send(number, _answer_of(done)))


def _answer_of(done: concurrent.futures.Future) -> bytes | Exception:
    return done.result() if (error := done.exception()) is None else _portable(error)


def _portable(error: Exception) -> RuntimeError:
    """Ray's own exceptions do not all survive a pipe."""
    return RuntimeError(f"{type(error).__name__}: {str(error).strip()[-500:]}")


def main(arguments: list[str]) -> None:
    descriptor, address, run_id, shards = arguments
    with Connection(int(descriptor)) as pipe:
        serve(pipe, RayTransport(Cluster(address, run_id, int(shards))))


if __name__ == "__main__":
    main(sys.argv[1:])
