"""The processes below this one, with those that were orphaned, and how they end."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TERMINATE_SECONDS = 6.0


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, in whatever session they are."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def terminate_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)


def descendants(keep: int | None = None) -> list[psutil.Process]:
    """Orphans included: they were adopted. Zombies are reaped and left out, `keep` is only left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if alive(process):
            found.append(process)
        elif process.pid != keep:
            _reap(process.pid)
    return found


def stop_descendants() -> None:
    """Terminate, then kill, every process started below this one, until none is left."""
    _stop(descendants)


def stop_marked(variable: str, value: str) -> None:
    """The same for this user's processes that were started with an environment variable of this value."""
    mark = f"{variable}={value}".encode()
    _stop(lambda: [process for process in psutil.process_iter() if mark in _environment(process)])


def _stop(find) -> None:
    deadline = time.monotonic() + TERMINATE_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        while found := find():
            for process in found:
                _signal(process, sign)
            psutil.wait_procs(found, timeout=1.0)
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def title(process: psutil.Process) -> str:
    """The first word of its command line, which Ray and vLLM set with setproctitle; empty for a process that ended."""
    try:
        return (process.cmdline() or [""])[0]
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return ""


def proportional_memory(process: psutil.Process) -> int:
    """Proportional set size in bytes: pages that several processes share are divided among them."""
    try:
        for line in Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return 0


def _reap(pid: int) -> None:
    try:
        os.waitpid(pid, os.WNOHANG)
    except OSError:
        pass  # somebody else's child; its parent reaps it


def _environment(process: psutil.Process) -> list[bytes]:
    try:
        return Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0") if alive(process) else []
    except OSError:
        return []


def _signal(process: psutil.Process, sign: int) -> None:
    try:
        process.send_signal(sign)
    except psutil.NoSuchProcess:
        pass
