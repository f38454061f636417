"""A variant's engine, in a process of its own that stays up and is told what to run by messages of JSON.

The process has a session of its own, so that Ctrl-C reaches this one alone, which ends the others. What it prints goes
to its log.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from multiprocessing import Pipe
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
        program: how to start it; it gets the descriptor of its end of a pipe as an argument.
    """

    def __init__(self, variant: str, log: Path, environment: dict[str, str], program: tuple[str, ...] = ENGINE):
        self.variant, self.log = variant, log
        self._pipe, theirs = Pipe()
        with theirs, log.open("ab") as output:
            self._process = subprocess.Popen(
                [*program, str(theirs.fileno())], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env=environment, pass_fds=(theirs.fileno(),), start_new_session=True,
            )  # fmt: skip

    def ask(self, command: dict[str, Any]) -> dict[str, Any]:
        """Send a command and wait for its reply.

        Raises:
            EngineError: the engine refused, or its process ended.
        """
        try:
            self._pipe.send_bytes(json.dumps(command).encode())
            while not self._pipe.poll(LOOK_SECONDS):
                if self._process.poll() is not None and not self._pipe.poll():
                    raise EOFError  # a process that it left behind holds the pipe open
            reply = json.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            code = self._process.wait()
            reply = {"error": f"the engine's process ended with code {code}"}
        if "error" in reply:
            raise EngineError(f"{self.variant}: {reply['error']}: see {self.log}")
        return reply

    def hang_up(self) -> None:
        """Tell the process to shut its engine down, whatever it does; may be called again."""
        if not self._pipe.closed:
            self._pipe.close()
            self._process.send_signal(signal.SIGINT)

    def stop(self) -> None:
        """End the process and all that it started; may be called again."""
        self.hang_up()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # and what it left running
            self._process.wait()


def stop_all(engines: Iterable[EngineProcess]) -> None:
    """End all of them, at the same time."""
    engines = list(engines)
    for engine in engines:
        engine.hang_up()
    for engine in engines:
        engine.stop()
