"""The way from the engines of a machine to the shards: one process beside them, which alone has joined Ray.

Beside them: Ray's core ends the process that it runs in where a check of its own fails. Seen with Ray 2.60 where two
engines that were forked from one process joined at once (`WarmupStore() ... Seal() called on an object without a
reference to it`). An engine has to outlive that: the relay dies, and the next question starts another.

One for all: a call of Ray takes either end about half a millisecond, whatever it carries, and a process that has joined
Ray some hundred MiB. What a machine's engines ask within a few milliseconds leaves in one call.
"""

import asyncio
import errno
import hashlib
import itertools
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence

from sam.sharing.messages import Message, Reply
from sam.sharing.packing import pack, unpack
from sam.sharing.shard import Answer, Cluster, ShardActors

# The number of a question, its shard (in an answer 0, or FAILED where text says why), and the bytes that follow.
FRAME = struct.Struct("<qiI")
FAILED = -1
ENDED = "the relay to Ray has ended"
GATHER_SECONDS = 0.01  # in which questions wait for those of other engines
# Of a call. Ray hands answers of up to 100 KB over with the call and longer ones through its object store, which takes
# longer; to an engine with 64 requests of 30 tokens/s and 15 siblings each it is 35 KB every 100 ms.
MAX_QUESTIONS = 3
SILENT_SECONDS = 5.0  # after which a call of a shard, or a relay that reads nothing, is given up
START_SECONDS = 5.0  # for another engine to open the door that it has just made
LINGER_SECONDS = 1.0  # for which a relay without engines waits for one
FIRST_SECONDS = 60.0  # and for the first one
READ_BYTES = 1 << 16


class RelayTransport:
    """Questions to shards through the machine's relay, started anew where it has ended.

    Args:
        cluster: where the shards are.
    """

    def __init__(self, cluster: Cluster):
        self._cluster, self._numbers = cluster, itertools.count()
        # Of Linux's abstract names: nothing lies in a folder, and the name is free again when the relay ends.
        name = hashlib.blake2b(cluster.run_id.encode(), digest_size=16).hexdigest()
        self._address = f"\0sam-sharing-{os.getuid()}-{name}"
        self._asked: dict[int, int] = {}  # the last question's number, by shard
        self._answers: dict[int, bytes | Exception] = {}
        self._unread = bytearray()
        self._relay: subprocess.Popen | None = None  # if this engine has started it
        self._socket: socket.socket | None = self._connect()

    def _connect(self) -> socket.socket:
        deadline = time.monotonic() + START_SECONDS
        while True:
            link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                link.connect(self._address)
                _check_owner(link)
                return link
            except BaseException as error:
                link.close()
                if not isinstance(error, ConnectionRefusedError) or time.monotonic() > deadline:
                    raise
            self._start()

    def _start(self) -> None:
        """Start the relay, unless another engine has just begun to. Who connects may wait at its door from now on."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            try:
                door.bind(self._address)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                time.sleep(GATHER_SECONDS)
                return
            door.listen(socket.SOMAXCONN)
            command = [sys.executable, "-m", "sam.sharing.relay", str(door.fileno()), *map(str, self._cluster)]
            # In a session of its own: what ends this engine's processes must not end the other engines' relay.
            self._relay = subprocess.Popen(
                command, pass_fds=(door.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True
            )

    def ask(self, shard: int, message: Message) -> int:
        """Send a question; its answer may be an error. An unanswered one to the same shard is forgotten.

        Raises ConnectionError where the relay has ended, so that this is counted; the next question finds another.
        """
        if self._socket is None:
            self._socket = self._connect()
        number = self._asked[shard] = next(self._numbers)
        self._answers = {asked: answer for asked, answer in self._answers.items() if asked in self._asked.values()}
        packed = pack(message)
        try:
            self._socket.settimeout(SILENT_SECONDS)
            self._socket.sendall(FRAME.pack(number, shard, len(packed)) + packed)
        except OSError as error:
            self._lose()
            raise ConnectionError(ENDED) from error
        return number

    def wait(self, pending: list[int], seconds: float) -> list[int]:
        """Those of `pending` that are answered within `seconds`; all, with errors, if the relay has ended."""
        deadline = time.monotonic() + seconds
        while not (ready := [number for number in pending if number in self._answers]):
            if self._socket is None:
                self._answers.update(dict.fromkeys(pending, ConnectionError(ENDED)))
            elif not self._read(deadline - time.monotonic()):
                return []
        return ready

    def _read(self, seconds: float) -> bool:
        """Take the answers that have come, after `seconds` at most; whether anything has."""
        try:
            self._socket.settimeout(max(1e-6, seconds))
            part = self._socket.recv(READ_BYTES)
        except TimeoutError:
            return False
        except OSError:
            part = b""
        if not part:
            self._lose()
            return True
        self._unread += part
        while len(self._unread) >= FRAME.size:
            number, status, length = FRAME.unpack_from(self._unread)
            if len(self._unread) < (end := FRAME.size + length):
                break
            answer = bytes(self._unread[FRAME.size : end])
            del self._unread[:end]
            if number in self._asked.values():
                self._answers[number] = RuntimeError(answer.decode()) if status == FAILED else answer
        return True

    def _lose(self) -> None:
        """Nothing that was asked will be answered."""
        self._socket.close()
        self._socket, self._unread = None, bytearray()
        unanswered = set(self._asked.values()) - set(self._answers)
        self._answers.update(dict.fromkeys(unanswered, ConnectionError(ENDED)))
        if self._relay is not None:
            self._relay.poll()

    def take(self, answer: int) -> Reply:
        """The answer that `wait` gave; raises what came instead."""
        reply = self._answers.pop(answer)
        if isinstance(reply, Exception):
            raise reply
        return unpack(Reply, reply)


def _check_owner(link: socket.socket) -> None:
    """Raise PermissionError if the other end's process belongs to somebody else."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"the other end of sharing's socket belongs to user {user}, expected {os.getuid()}")


class Relay:
    """Passes on questions and answers until the last engine has gone.

    Args:
        call: asks a shard several questions at once.
    """

    def __init__(self, call: Callable[[int, list[bytes]], Awaitable[Sequence[Answer]]]):
        self._call = call
        # By shard and engine: the question's number, and the question.
        self._waiting: dict[int, dict[asyncio.StreamWriter, tuple[int, bytes]]] = {}
        self._calls: set[asyncio.Task] = set()  # asyncio itself holds none of them
        self._engines: set[asyncio.StreamWriter] = set()
        self._alone_since, self._patience = time.monotonic(), FIRST_SECONDS

    async def serve(self, door: socket.socket) -> None:
        """Listen at `door`."""
        server = await asyncio.start_unix_server(self._listen, sock=door)
        while self._engines or time.monotonic() < self._alone_since + self._patience:
            await asyncio.sleep(LINGER_SECONDS / 4)
        server.close()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engines.add(writer)
        try:
            _check_owner(writer.get_extra_info("socket"))
            while True:
                number, shard, length = FRAME.unpack(await reader.readexactly(FRAME.size))
                self._put(writer, number, shard, await reader.readexactly(length))
        except (asyncio.IncompleteReadError, OSError):
            pass  # it has gone
        finally:
            self._engines.remove(writer)
            self._alone_since, self._patience = time.monotonic(), LINGER_SECONDS
            writer.close()

    def _put(self, writer: asyncio.StreamWriter, number: int, shard: int, message: bytes) -> None:
        waiting = self._waiting.setdefault(shard, {})
        if not waiting:
            asyncio.get_running_loop().call_later(GATHER_SECONDS, self._send, shard)
        waiting[writer] = number, message

    def _send(self, shard: int) -> None:
        """Ask the shard what has been gathered. No call waits for another one."""
        asked = list(self._waiting.pop(shard).items())
        for first in range(0, len(asked), MAX_QUESTIONS):
            call = asyncio.create_task(self._ask(shard, dict(asked[first : first + MAX_QUESTIONS])))
            self._calls.add(call)
            call.add_done_callback(self._calls.discard)

    async def _ask(self, shard: int, asked: dict[asyncio.StreamWriter, tuple[int, bytes]]) -> None:
        answers = await self._answers(shard, [message for _, message in asked.values()])
        for (writer, (number, _)), answer in zip(asked.items(), answers, strict=True):
            failed, text = (FAILED, answer.encode()) if isinstance(answer, str) else (0, answer)
            if not writer.is_closing():
                writer.write(FRAME.pack(number, failed, len(text)) + text)

    async def _answers(self, shard: int, messages: list[bytes]) -> Sequence[Answer]:
        try:
            return await asyncio.wait_for(self._call(shard, messages), SILENT_SECONDS)
        except Exception as error:  # Ray's, of any kind
            return [f"{type(error).__name__}: {str(error).strip()[-500:]}"] * len(messages)


def main(arguments: list[str]) -> None:
    descriptor, address, run_id, shards = arguments
    actors = ShardActors(Cluster(address, run_id, int(shards)))
    relay = Relay(lambda shard, messages: asyncio.wrap_future(actors.exchange(shard, messages)))
    with socket.socket(fileno=int(descriptor)) as door:
        asyncio.run(relay.serve(door))


if __name__ == "__main__":
    main(sys.argv[1:])
