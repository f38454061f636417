"""Runs a command alone in a directory and leaves nothing behind: processes, shared memory, sockets, temporary files.

verl, Ray and vLLM start dozens of processes in sessions of their own, which outlive a killed driver; a vLLM
process that dies during a weight sync makes verl wait for ever. So the user's process adopts the run's orphans
(PR_SET_CHILD_SUBREAPER), watches them, and clears up however the run ends (`supervise`). If it is killed, the run's own
process clears up in its place (`supervised`); if both are, the next start does.
"""

import ctypes
import fcntl
import json
import math
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from recipe.sam_dapo.launch.config import ConfigError
from recipe.sam_dapo.launch.screen import ERROR_FILE, LOG_FILE, Ending, failed, is_death, role_of, write_last_line
from recipe.sam_dapo.record import LOCK_FILE, STATE_FILE, read_json

VARIABLE = "RECIPE_RUN_SCRATCH"  # names a private folder to the processes of the run
# What processes that are killed leave in memory: Python's, torch's and verl's.
SHARED_MEMORY = Path("/dev/shm")
SHARED_NAMES = ("psm_*", "sem.*", "torch_*", "verl_weights_*")
LOCK_BYTES = 512  # of LOCK_FILE, which cannot be replaced while it is locked: one write of one size leaves it whole
PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36
POLL_SECONDS = 0.25  # looking at the processes known to be needed
SCAN_SECONDS = 2.0  # looking for new ones, some thirty, costs a few milliseconds
GRACE_SECONDS = 8.0  # verl may notice by itself that a process died, and say more about it
TERMINATE_SECONDS = 6.0
STOPS = (signal.SIGINT, signal.SIGTERM)
ORPHANED = signal.SIGUSR1


def _raise_once(*numbers: int) -> None:
    """Let signals raise KeyboardInterrupt, and what comes later pass, while that is being dealt with: the kernel sends
    ORPHANED each time that a thread of the parent ends."""

    def stop(*_) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    # A shell without job control starts background commands with SIGINT ignored; here it always means to stop.
    for number in numbers:
        signal.signal(number, stop)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


@contextmanager
def lock(run_directory: Path) -> Iterator[None]:
    """Hold a run's directory, after what a killed run has left is removed; ConfigError: another run holds it."""
    run_directory.mkdir(parents=True, exist_ok=True)
    path = run_directory / LOCK_FILE
    path.touch()
    with open(path, "rb+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = read_json(path)
            raise ConfigError(
                f"run_dir={run_directory} is used by a run that goes on (process {holder.get('pid')} on "
                f"{holder.get('host')}): wait for it, stop it, choose another run_dir=, or, if that node has died, "
                f"remove {path}"
            ) from None
        _release(run_directory)
        _write_holder(path, {"pid": os.getpid(), "host": platform.node()})
        try:
            yield
        finally:
            file.truncate(0)  # not removed: another process may wait at it


def _write_holder(path: Path, holder: dict) -> None:
    """Say in LOCK_FILE who holds the run's directory, in one write."""
    with open(path, "rb+", buffering=0) as file:
        file.write(json.dumps(holder).ljust(LOCK_BYTES).encode())


def exit_code_of(status: int | None) -> int:
    """A shell's exit code for a command that failed: above 128 the signal that ended it, 1 where it still runs.

    Example:
        >>> exit_code_of(3), exit_code_of(-9), exit_code_of(None)
        (3, 137, 1)
    """
    if status is None:
        return 1
    return 128 - status if status < 0 else status


def supervise(
    command: list[str], run_directory: Path, sync_seconds: float, origin: Path | None, on_poll: Callable[[], None]
) -> Ending:
    """Run `command` to its end and clear up after it, below `lock`; calls `on_poll` a few times a second.

    The environment variable VARIABLE names a private folder to it; its output is appended to train.log, its standard
    input is the screen (`supervised`). A weight sync may last `sync_seconds`. `origin` is the checkpoint that it loads.
    """
    (run_directory / STATE_FILE).unlink(missing_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="sam-"))  # short: socket names may have 107 characters
    error = folder / ERROR_FILE
    watch = Watch(run_directory, error, sync_seconds)
    _raise_once(*STOPS)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        lock_file = run_directory / LOCK_FILE
        _write_holder(lock_file, read_json(lock_file) | {"folder": str(folder), "began": time.time()})
        with open(run_directory / LOG_FILE, "ab") as log:
            environment = {**os.environ, VARIABLE: str(folder)}
            child = subprocess.Popen(command, env=environment, stdin=2, stdout=log, stderr=log, start_new_session=True)
        status = None
        hopeless = None
        while status is None and not hopeless:
            time.sleep(POLL_SECONDS)
            status = child.poll()
            if status is None:
                hopeless = watch.why_hopeless()
            with suppress(OSError, ValueError):  # a terminal that was closed, a row that a full disk has cut
                on_poll()
        if status == 0:
            return Ending(0)
        text = error.read_text() if error.exists() else ""
        if hopeless and not (text or watch.dead):
            return Ending(1, hopeless)
        if is_death(text):  # of another exception they may be the consequence
            watch.find_dead()
        return failed(exit_code_of(status), watch.dead, text, run_directory, origin)
    except KeyboardInterrupt:
        return Ending(130, "interrupted")
    finally:
        for number in STOPS:  # a second Ctrl-C must not stop the clearing up
            signal.signal(number, signal.SIG_IGN)
        _stop(_descendants)
        _release(run_directory)


@contextmanager
def supervised(run_directory: Path) -> Iterator[None]:
    """In the command of `supervise`: clear up, say so on the screen and end, if the supervisor is killed."""
    supervisor = read_json(run_directory / LOCK_FILE)["pid"]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        _raise_once(ORPHANED)
        _prctl(PR_SET_PDEATHSIG, ORPHANED)  # even by SIGKILL
        if os.getppid() != supervisor:
            raise KeyboardInterrupt
        yield
    except KeyboardInterrupt:
        # Ray's client ends a process whose raylet is gone: it clears up as another program, which has its children.
        words = f"from {__name__} import clear_up; clear_up({str(run_directory)!r}, {supervisor})"
        os.execv(sys.executable, [sys.executable, "-c", words])


def clear_up(run_directory: str, supervisor: int) -> None:
    """In place of the supervisor, whose end is the run's."""
    _stop(_descendants)
    directory = Path(run_directory)
    _release(directory)
    write_last_line(directory, Ending(137, f"the supervisor (process {supervisor}) was killed"), screen=open(0, "w"))


class Watch:
    """Looks whether a run can only hang: a needed process has died (`dead`: those that a first look finds, names by
    role), or a weight sync takes too long."""

    def __init__(self, run_directory: Path, error_file: Path, sync_seconds: float):
        self.state_file = run_directory / STATE_FILE
        self.error_file = error_file
        self.sync_seconds = sync_seconds
        self.dead: dict[str, str] = {}
        self._needed: dict[psutil.Process, str] = {}
        self._next_scan = 0.0
        self._over_since = math.inf

    def why_hopeless(self) -> str | None:
        """One look, a few times a second; why waiting has no sense, if it has none."""
        if time.monotonic() >= self._next_scan:
            self._next_scan = time.monotonic() + SCAN_SECONDS
            self._scan()
        state = read_json(self.state_file)
        if state.get("phase") == "weight_sync" and time.time() - state["since"] > self.sync_seconds:
            return f"weight_sync has taken more than {self.sync_seconds:.0f} s (watchdog.weight_sync_seconds)"
        # With an exception, or at its end, a run ends them all.
        if self._over_since == math.inf and state.get("phase") != "finished":
            if self.error_file.exists() or self.find_dead():
                self._over_since = time.monotonic()
        return "it does not end" if time.monotonic() - self._over_since > GRACE_SECONDS else None

    def find_dead(self) -> bool:
        """Whether a needed process has ended."""
        ended = {role: process.pid for process, role in self._needed.items() if not _is_alive(process)}
        self.dead = self.dead or {role: f"{role} (process {pid})" for role, pid in ended.items()}
        return bool(self.dead)

    def _scan(self) -> None:
        """Look for needed processes, but new ones: what an engine starts bears its title for a moment too, between fork
        and exec. Ray and vLLM set titles, the first word of a command line, with setproctitle."""
        for process in _descendants():
            with suppress(psutil.Error, OSError, IndexError):
                role = role_of(process.cmdline()[0])
                if role and time.time() - process.create_time() > SCAN_SECONDS:
                    self._needed[process] = role


def _release(run_directory: Path) -> None:
    """End the processes of the run in LOCK_FILE, and remove its folder, sockets, shared memory, half-written files."""
    holder = read_json(run_directory / LOCK_FILE)
    folder = holder.get("folder")
    if not folder or not Path(folder).exists():
        return

    def run_processes() -> list[psutil.Process]:
        others = (process for process in psutil.process_iter(["environ"]) if process.pid != os.getpid())
        return [process for process in others if (process.info["environ"] or {}).get(VARIABLE) == folder]

    _stop(run_processes)
    for partial in (*run_directory.glob("*.partial*"), *run_directory.glob("*/*.partial*")):
        partial.unlink(missing_ok=True)
    _remove_shared_memory(holder["began"])
    # verl's own, always in /tmp, with recipe.sam_dapo.rollout.SESSION: a run killed in a weight sync leaves them there.
    for socket in Path("/tmp").glob(f"rl-colocate-zmq-*{Path(folder).name}*"):
        socket.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_shared_memory(since: float) -> None:
    """Remove the user's files that appeared since then and that no process has mapped, as another run has its own.

    By number and not by name: a semaphore is mapped under the name that it was made with, which is gone (glibc's
    sem_open), and a process that is spawned opens it under the one that it was given.
    """
    by_inode = {}
    for path in (path for name in SHARED_NAMES for path in SHARED_MEMORY.glob(name)):
        with suppress(OSError):
            status = path.stat()
            if status.st_uid == os.getuid() and status.st_ctime >= since:
                by_inode[status.st_ino] = path
    if not by_inode:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            for inode in re.findall(rf" (\d+) +{SHARED_MEMORY}/", maps.read_text()):
                by_inode.pop(int(inode), None)
    for path in by_inode.values():
        path.unlink(missing_ok=True)


def _stop(find: Callable[[], list[psutil.Process]]) -> None:
    """Terminate, then kill, until there is none left."""
    deadline = time.monotonic() + TERMINATE_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        while processes := find():
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
            psutil.wait_procs(processes, timeout=1.0)
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break


def _descendants() -> list[psutil.Process]:
    """The processes below this one that run, adopted orphans included."""
    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs: a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
