"""What a run holds outside Python, and how it is given back: its directory, processes, a private folder, shared memory.

`running.json` in the run's directory says who holds it, and what there is to be removed: the supervisor does so however
the run ends, the process that started it where the supervisor was killed, the next start where both were.
"""

import ctypes
import json
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from recipe.launch import checkpoints
from recipe.launch.config import ConfigError
from recipe.record.run_directory import LOCK_FILE, read_json

VARIABLE = "RECIPE_RUN_SCRATCH"  # names the private folder to the processes of the run
SHARED_MEMORY = Path("/dev/shm")
PREVIOUS_RUN_SECONDS = 60.0
TERMINATE_SECONDS = 6.0
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, in whatever session they are."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def terminate_with_parent(sign: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sign), 0, 0, 0)


def descendants() -> list[psutil.Process]:
    """The processes below this one that run, adopted orphans included."""
    return [process for process in psutil.Process().children(recursive=True) if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs: a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def stop(find: Callable[[], list[psutil.Process]] = descendants) -> None:
    """Terminate, then kill, until none is found; reap those that ended below this process."""
    deadline = time.monotonic() + TERMINATE_SECONDS
    for sign in (signal.SIGTERM, signal.SIGKILL):
        while found := find():
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(sign)
            psutil.wait_procs(found, timeout=1.0)
            if sign == signal.SIGTERM and time.monotonic() > deadline:
                break
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def lock_problem(run_directory: Path) -> str | None:
    """Why no run may start in a directory: another holds it. None if its holder was killed on this node."""
    path, used = run_directory / LOCK_FILE, f"run_dir={run_directory} is used by a run"
    pid, host, since = map((holder := read_json(path)).get, ("pid", "host", "since"))
    if host not in (None, platform.node()):
        return (
            f"{used} on {host} (process {pid}, since {since}): stop it there, choose another run_dir=, or, if that "
            f"node has died, remove {path}"
        )
    if _is_running(holder):
        return f"{used} that goes on (process {pid}, since {since}): wait for it, stop it, or choose another run_dir="
    return None


@contextmanager
def lock(run_directory: Path) -> Iterator[None]:
    """Hold a run's directory, after what a killed run has left there is removed.

    Raises:
        ConfigError, FileExistsError: another run holds it.
    """
    if problem := lock_problem(run_directory):
        raise ConfigError(problem)
    run_directory.mkdir(parents=True, exist_ok=True)
    path, deadline = run_directory / LOCK_FILE, time.monotonic() + PREVIOUS_RUN_SECONDS
    while _is_running(read_json(path).get("supervisor", {})) and time.monotonic() < deadline:
        time.sleep(0.2)  # it is still giving back what its run held
    release(run_directory, read_json(path))
    path.unlink(missing_ok=True)
    with open(path, "x") as file:  # fails where another run has started at this moment
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({**_this_process(), "host": platform.node(), "since": since}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def claim(run_directory: Path) -> dict:
    """Make a private folder, and note in running.json what `release` takes: this process is the run's supervisor."""
    folder = tempfile.mkdtemp(prefix="sam-")  # a short path: socket names may have 107 characters
    present = sorted(map(str, SHARED_MEMORY.glob("*")))
    held = {"supervisor": _this_process(), "folder": folder, "began": time.time(), "shared_memory": present}
    (path := run_directory / LOCK_FILE).write_text(json.dumps(read_json(path) | held))
    return held


def release(run_directory: Path, held: dict) -> None:
    """End the processes of a run, and remove its folder, sockets, shared memory and half-written files."""
    if not (folder := held.get("folder")) or not Path(folder).exists():
        return

    def of_this_run() -> list[psutil.Process]:
        every = psutil.process_iter(["environ"])
        return [process for process in every if (process.info["environ"] or {}).get(VARIABLE) == folder]

    stop(of_this_run)
    checkpoints.remove_unfinished(run_directory, held["began"])
    for partial in (*run_directory.glob("*.partial*"), *run_directory.glob("*/*.partial*")):
        partial.unlink(missing_ok=True)
    with suppress(OSError):  # what appears long after the supervisor's last look at the run is not the run's
        until = (run_directory / LOCK_FILE).stat().st_mtime + PREVIOUS_RUN_SECONDS
        _remove_shared_memory(set(held["shared_memory"]), until)
    # verl's own (recipe.rollout.weight_sync), always in /tmp: a run killed in a weight sync leaves them there.
    for session in Path(folder).glob("ray/session_2*"):
        for socket in Path("/tmp").glob(f"rl-colocate-zmq-*{session.name.removeprefix('session_')}*"):
            socket.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_shared_memory(before: set[str], until: float) -> None:
    """Remove the user's files that appeared during the run and that no process has mapped, as another run has its own.

    By number and not by name: a semaphore is mapped under the name that it was made with, which is gone (glibc's
    sem_open), and a process that is spawned opens it under the one that it was given.
    """
    candidates = {}
    for path in SHARED_MEMORY.glob("*"):
        with suppress(OSError):
            status = path.stat()
            own = path.is_file() and status.st_uid == os.getuid() and status.st_ctime <= until
            if own and str(path) not in before:
                candidates[status.st_ino] = path
    for maps in Path("/proc").glob("[0-9]*/maps") if candidates else ():
        with suppress(OSError):
            for line in maps.read_text().splitlines():
                _, _, _, _, number, *path = line.split(maxsplit=5)
                if path and path[0].startswith(f"{SHARED_MEMORY}/"):
                    candidates.pop(int(number), None)
    for path in candidates.values():
        path.unlink(missing_ok=True)


def _this_process() -> dict:
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_running(noted: dict) -> bool:
    """Whether a process that `_this_process` noted is still there, not another of its number."""
    with suppress(psutil.Error, KeyError):
        return is_alive(process := psutil.Process(noted["pid"])) and process.create_time() == noted["started"]
    return False
