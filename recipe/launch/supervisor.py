"""Runs a command and leaves nothing behind: processes, shared memory, sockets, temporary files.

verl, Ray and vLLM start dozens of processes in sessions of their own, which outlive a killed driver; a vLLM
process that dies during a weight sync makes verl wait for ever. So the run is a child of this process, which
adopts its orphans (PR_SET_CHILD_SUBREAPER), watches it, and clears up however it ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from recipe.record.run_directory import STATE_FILE

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
POLL_SECONDS = 2.0  # looking at some thirty processes costs a few milliseconds
MEMORY_EVERY_SECONDS = 5.0
ENGINE_GRACE_SECONDS = 10.0  # verl may notice a dead engine by itself and say more about it
TERMINATE_SECONDS = 8.0
ENGINE_TITLES = ("VLLM::EngineCore", "VLLM::Worker")  # set by vLLM with setproctitle


def supervise(
    command: list[str],
    run_directory: Path,
    scratch_variable: str,
    phase_limits: dict[str, float],
    log: Path | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> int:
    """Run `command` to its end and clear up after it.

    Args:
        command: started with `scratch_variable` naming a private directory that is removed afterwards.
        run_directory: holds the run's state.json; gets peak_memory.json.
        phase_limits: seconds that a phase named in state.json may last.
        log: file for the command's output; None leaves it on the terminal.
        on_poll: called every two seconds while the command runs.

    Returns:
        The command's exit code; 130 after Ctrl-C, 1 when the watchdog stopped it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    (run_directory / STATE_FILE).unlink(missing_ok=True)
    # A short path: socket names may have 107 characters.
    scratch = Path(tempfile.mkdtemp(prefix="sam-"))
    shared_memory_before = _shared_memory_files()
    signal.signal(signal.SIGTERM, _raise_interrupt)
    # A shell without job control starts background commands with SIGINT ignored; here it always means to stop.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = open(log, "ab") if log else None
    child = subprocess.Popen(
        command,
        env={**os.environ, scratch_variable: str(scratch)},
        start_new_session=True,
        stdout=output,
        stderr=subprocess.STDOUT if output else None,
    )
    watch = Watch(child, run_directory, phase_limits)
    try:
        return watch.until_end(on_poll)
    except KeyboardInterrupt:
        print("interrupted: stopping the run", file=sys.stderr)
        return 130
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not stop the clearing up
        stop_descendants()
        _remove_weight_sockets(scratch)
        shutil.rmtree(scratch, ignore_errors=True)
        _remove_shared_memory(shared_memory_before)
        watch.write_peak_memory()
        signal.signal(signal.SIGINT, signal.default_int_handler)


class Watch:
    """Waits for the child; ends the wait when the run can only hang."""

    def __init__(self, child: subprocess.Popen, run_directory: Path, phase_limits: dict[str, float]):
        self.child = child
        self.run_directory = run_directory
        self.phase_limits = phase_limits
        self.engines: dict[int, psutil.Process] = {}
        self._titled_before: set[int] = set()
        self.peak_memory = 0
        self._engine_died_at: float | None = None
        self._next_memory = 0.0

    def until_end(self, on_poll: Callable[[], None]) -> int:
        while (code := self._wait()) is None:
            on_poll()
            processes = _descendants(keep=self.child.pid)
            self._measure_memory(processes)
            if reason := self._why_hopeless(processes):
                print(f"error: {reason}; stopping the run (its log is above)", file=sys.stderr)
                return 1
        return code if code >= 0 else 128 - code

    def _wait(self) -> int | None:
        try:
            return self.child.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return None

    def _why_hopeless(self, processes: list[psutil.Process]) -> str | None:
        state = self._state()
        phase, since = state.get("phase"), state.get("since", time.time())
        limit = self.phase_limits.get(phase)
        if limit is not None and time.time() - since > limit:
            return f"{phase} has taken more than {limit:.0f} s (watchdog.{phase}_seconds)"
        if phase == "finished":
            return None
        # Twice in a row: what an engine starts bears its title for a moment too, between fork and exec.
        titled = {process.pid: process for process in processes if _is_engine(process)}
        self.engines |= {pid: titled[pid] for pid in titled.keys() & self._titled_before - self.engines.keys()}
        self._titled_before = set(titled)
        dead = [process for process in self.engines.values() if not _alive(process)]
        if dead and self._engine_died_at is None:
            self._engine_died_at = time.monotonic()
        if dead and time.monotonic() - self._engine_died_at > ENGINE_GRACE_SECONDS:
            return f"vLLM process {dead[0].pid} died"
        return None

    def _state(self) -> dict:
        try:
            return json.loads((self.run_directory / STATE_FILE).read_text())
        except (OSError, ValueError):
            return {}

    def _measure_memory(self, processes: list[psutil.Process]) -> None:
        if time.monotonic() < self._next_memory:
            return
        self._next_memory = time.monotonic() + MEMORY_EVERY_SECONDS
        self.peak_memory = max(self.peak_memory, sum(map(_proportional_memory, processes)))

    def write_peak_memory(self) -> None:
        """Peak of the processes' proportional set sizes (shared pages counted once), in GiB."""
        content = {"peak_memory_gib": round(self.peak_memory / 2**30, 2)}
        (self.run_directory / "peak_memory.json").write_text(json.dumps(content))


def stop_descendants() -> None:
    """Terminate, then kill, every process started below this one, until none is left."""
    deadline = time.monotonic() + TERMINATE_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        while processes := _descendants():
            for process in processes:
                _signal(process, sign)
            psutil.wait_procs(processes, timeout=1.0)
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break


def _raise_interrupt(*_) -> None:
    raise KeyboardInterrupt


def _descendants(keep: int | None = None) -> list[psutil.Process]:
    """Orphans included: they were adopted. Zombies are reaped and left out, `keep` is only left out."""
    alive = []
    for process in psutil.Process().children(recursive=True):
        if _alive(process):
            alive.append(process)
        elif process.pid != keep:
            _reap(process.pid)
    return alive


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        pass  # somebody else's child; its parent reaps it


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_engine(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[:1] != [] and process.cmdline()[0].startswith(ENGINE_TITLES)
    except (psutil.NoSuchProcess, psutil.AccessDenied, IndexError):
        return False


def _proportional_memory(process: psutil.Process) -> int:
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def _signal(process: psutil.Process, sign: int) -> None:
    try:
        process.send_signal(sign)
    except psutil.NoSuchProcess:
        pass


def _remove_weight_sockets(scratch: Path) -> None:
    """verl's own (recipe.rollout.weight_sync), always in /tmp: a run killed during a weight sync leaves them there."""
    for session in scratch.glob("ray/session_2*"):
        for socket in Path("/tmp").glob(f"rl-colocate-zmq-*{session.name.removeprefix('session_')}*"):
            socket.unlink(missing_ok=True)


def _shared_memory_files() -> set[Path]:
    return set(Path("/dev/shm").iterdir()) if Path("/dev/shm").is_dir() else set()


def _remove_shared_memory(before: set[Path]) -> None:
    """Remove the user's files that appeared during the run and that no process has open: another run of the same
    user holds its own open."""
    candidates = {
        str(path) for path in _shared_memory_files() - before if path.is_file() and path.stat().st_uid == os.getuid()
    }
    if not candidates:
        return
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            candidates -= {line.split(maxsplit=5)[-1].strip() for line in maps.read_text().splitlines()}
        except OSError:
            continue
    for name in candidates:
        Path(name).unlink(missing_ok=True)
