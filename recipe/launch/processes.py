"""The processes below this one, with those that were orphaned, and how they end."""

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
TERMINATE_SECONDS = 6.0


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, in whatever session they are."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def terminate_with_parent(sign: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sign), 0, 0, 0)


def descendants(keep: int | None = None) -> list[psutil.Process]:
    """Orphans included: they were adopted. Zombies are reaped and left out, `keep` is only left out."""
    found = []
    for process in psutil.Process().children(recursive=True):
        if alive(process):
            found.append(process)
        elif process.pid != keep:
            with suppress(OSError):  # somebody else's child; its parent reaps it
                os.waitpid(process.pid, os.WNOHANG)
    return found


def stop_marked(variable: str, value: str) -> None:
    """End this user's processes that were started with an environment variable of this value."""

    def marked() -> list[psutil.Process]:
        every = psutil.process_iter(["environ"])
        return [process for process in every if (process.info["environ"] or {}).get(variable) == value]

    stop(marked)


def stop(find: Callable[[], list[psutil.Process]] = descendants) -> None:
    """Terminate, then kill, until none is found: every process started below this one."""
    deadline = time.monotonic() + TERMINATE_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        while found := find():
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
            psutil.wait_procs(found, timeout=1.0)
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break


def alive(process: psutil.Process) -> bool:
    """Whether it runs: a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
