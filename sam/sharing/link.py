"""The way from an engine's process to the log: a Unix socket to the server that has started the engine.

The server is a process of Ray and asks the log there; the engine has not joined Ray, whose core ends its process where
a check of its own fails. There is no port: the socket has an abstract name of Linux, which leaves no file behind, and
either end refuses other users. A message is its length and its bytes.
"""

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable

LENGTH = struct.Struct("<i")  # of a message; negative: of the words that say why there is none
ANSWER_SECONDS = 5.0  # after which the server gives a question up; the engine waits a second more


def address_of(run_id: str, replica: int) -> str:
    """Where the servers of a replica listen, each on its own machine."""
    return f"\0sam-sharing-{os.getuid()}-{run_id}-{replica}"


async def serve(address: str, ask: Callable[[bytes], Awaitable[bytes]]) -> asyncio.Server:
    """Listen at `address`, as `address_of` gives it, and pass on the questions of engines by `ask`."""

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            _check_owner(writer.get_extra_info("socket"))
            while True:
                (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                question = await reader.readexactly(length)
                try:
                    answer = await asyncio.wait_for(ask(question), ANSWER_SECONDS)
                    writer.write(LENGTH.pack(len(answer)) + answer)
                except Exception as error:  # Ray's, of any kind
                    cause = repr(error).encode()
                    writer.write(LENGTH.pack(-len(cause)) + cause)
        except (asyncio.IncompleteReadError, OSError):
            pass  # the engine has gone
        finally:
            writer.close()

    return await asyncio.start_unix_server(listen, address)


class Link:
    """An engine's end: asks one question after the other, over a new connection after a failure."""

    def __init__(self, address: str):
        self._address = address
        self._open = contextlib.ExitStack()
        self._stream = None

    def ask(self, question: bytes) -> bytes:
        """The log's answer; raises OSError if there is none."""
        try:
            if self._stream is None:
                self._connect()
            self._stream.write(LENGTH.pack(len(question)) + question)
            self._stream.flush()
            (length,) = LENGTH.unpack(self._read(LENGTH.size))
            answer = self._read(abs(length))
            if length < 0:
                raise ConnectionError(f"the log does not answer: {answer.decode()[-500:]}")
            return answer
        except BaseException:  # after an interrupt, too, a part of an answer may be under way
            self._stream = None
            self._open.close()
            raise

    def _connect(self) -> None:
        link = self._open.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        link.settimeout(ANSWER_SECONDS + 1.0)
        link.connect(self._address)
        _check_owner(link)
        self._stream = self._open.enter_context(link.makefile("rwb"))

    def _read(self, length: int) -> bytes:
        content = self._stream.read(length)
        if len(content) < length:
            raise ConnectionError("the engine's server has ended")
        return content


def _check_owner(link: socket.socket) -> None:
    """Raise PermissionError if the other end's process belongs to somebody else."""
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
    if user != os.getuid():
        raise PermissionError(f"the other end of sharing's socket belongs to user {user}, expected {os.getuid()}")
