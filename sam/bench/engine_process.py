"""A variant's engine, in a process of its own that stays up and is told what to run by lines of JSON.

The process has a session of its own, so that Ctrl-C reaches this one alone, which ends the others. It reads from one
pipe and answers on another; what it prints goes to its log.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ENGINE = (sys.executable, "-m", "sam.vllm.bench.engine")
STOP_SECONDS = 20.0  # to shut an engine down before it is killed
LOOK_SECONDS = 0.5  # how often a process is looked after that does not answer


class EngineError(RuntimeError):
    """An engine refused or ended; one line with its log."""


class EngineProcess:
    """One variant's engine.

    Args:
        variant: its name.
        log: file for what it prints.
        environment: all its environment variables.
        program: how to start it; it gets the descriptors of its two pipes as arguments.

    Attributes:
        start_s: seconds until it was ready, once somebody has measured them.
    """

    def __init__(self, variant: str, log: Path, environment: dict[str, str], program: tuple[str, ...] = ENGINE):
        self.variant, self.log = variant, log
        (theirs_in, self._commands), (self._replies, theirs_out) = os.pipe(), os.pipe()
        self._read = b""
        self.start_s = 0.0
        try:
            with log.open("ab") as output:
                self._process = subprocess.Popen(
                    [*program, str(theirs_in), str(theirs_out)],
                    stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                    env=environment, pass_fds=(theirs_in, theirs_out), start_new_session=True,
                )  # fmt: skip
        finally:
            os.close(theirs_in)
            os.close(theirs_out)

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its reply; raises what `reply` raises."""
        self.tell(command)
        return self.reply()

    def tell(self, command: dict[str, Any]) -> None:
        """Send a command; its reply is to be had from `reply`."""
        with contextlib.suppress(BrokenPipeError):  # `reply` says how it ended
            self._send((json.dumps(command) + "\n").encode())

    def reply(self) -> dict[str, Any]:
        """Wait for the reply to the earliest command that has none yet.

        Raises:
            EngineError: the engine refused, or its process ended.
        """
        try:
            reply = self._reply()
        except EOFError as error:
            code = self._process.wait()
            raise EngineError(f"{self.variant}: the engine's process ended with code {code}: see {self.log}") from error
        if "error" in reply:
            raise EngineError(f"{self.variant}: {reply['error']}: see {self.log}")
        return reply

    def has_workers(self) -> bool:
        """Whether the engine has started processes of its own, as it does by default."""
        import psutil

        return bool(psutil.Process(self._process.pid).children(recursive=True))

    def hang_up(self) -> None:
        """Close the pipes, which tells the process to shut its engine down; may be called again."""
        for descriptor in (self._commands, self._replies):
            if descriptor is not None:
                os.close(descriptor)
        self._commands = self._replies = None

    def stop(self) -> None:
        """End the process and all that it started; may be called again."""
        self.hang_up()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it left running
            except ProcessLookupError:
                pass
            self._process.wait()

    def _send(self, content: bytes) -> None:
        while content:
            content = content[os.write(self._commands, content) :]

    def _reply(self) -> dict[str, Any]:
        while b"\n" not in self._read:
            readable, _, _ = select.select([self._replies], [], [], LOOK_SECONDS)
            if readable:
                if not (more := os.read(self._replies, 1 << 16)):
                    raise EOFError
                self._read += more
            elif self._process.poll() is not None:
                raise EOFError  # a process that it left behind holds the pipe open
        line, _, self._read = self._read.partition(b"\n")
        return json.loads(line)


def stop_all(engines: Iterable[EngineProcess]) -> None:
    """End all of them, at the same time."""
    engines = list(engines)
    for engine in engines:
        engine.hang_up()
    for engine in engines:
        engine.stop()
