"""A run's private folder under the temporary directory, and what else a run may leave outside its run directory.

The folder holds a file that the process which watches the run keeps locked. The kernel drops the lock however that
dies, so a folder whose lock is free belongs to nobody, and the next run removes it.
"""

import fcntl
import json
import os
import shutil
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Self

from recipe.launch import checkpoints, processes
from recipe.record import read_json

VARIABLE = "RECIPE_RUN_SCRATCH"  # names the folder to the process that does the run
PREFIX = "sam-"
OWNER_FILE = "owner.json"
ERROR_FILE = "error.json"
SHARED_MEMORY = Path("/dev/shm")
PREVIOUS_RUN_SECONDS = 60.0


class Scratch:
    """The folder `directory`; `create` makes one and keeps it from `remove_abandoned` while this process lives."""

    def __init__(self, directory: Path):
        self.directory = directory
        self.owner = directory / OWNER_FILE

    @classmethod
    def create(cls, run_directory: Path) -> Self:
        # A short path: socket names may have 107 characters.
        scratch = cls(Path(tempfile.mkdtemp(prefix=PREFIX)))
        scratch._held = open(scratch.owner, "x")
        fcntl.flock(scratch._held, fcntl.LOCK_EX)
        content = {"run_directory": str(run_directory.resolve()), "since": time.time()}
        scratch.owner.write_text(json.dumps({**content, "shared_memory": sorted(map(str, SHARED_MEMORY.glob("*")))}))
        return scratch

    def touch(self) -> None:
        """Say that the run goes on: shared memory that appears long after the last call is not its own."""
        with suppress(OSError):  # who empties the temporary directory does not end the run
            os.utime(self.owner)

    def remove(self) -> None:
        """The folder, sockets, shared memory and half-written files of a run whose processes have ended."""
        if owner := read_json(self.owner):
            run_directory = Path(owner["run_directory"])
            checkpoints.remove_unfinished(run_directory, owner["since"])
            for partial in (*run_directory.glob("*.partial*"), *run_directory.glob("*/*.partial*")):
                partial.unlink(missing_ok=True)
            _remove_shared_memory(set(owner["shared_memory"]), self.owner.stat().st_mtime + PREVIOUS_RUN_SECONDS)
        # verl's own (recipe.trainer.workers), always in /tmp: a run killed in a weight sync leaves them there.
        for session in self.directory.glob("ray/session_2*"):
            for socket in Path("/tmp").glob(f"rl-colocate-zmq-*{session.name.removeprefix('session_')}*"):
                socket.unlink(missing_ok=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    def write_error(self, error: BaseException) -> None:
        """Called by the run for the process that says how it ended."""
        text = "".join(traceback.format_exception(error))
        content = {"type": type(error).__name__, "text": text, "at": time.time()}
        with suppress(OSError):  # a full disk
            (self.directory / ERROR_FILE).write_text(json.dumps(content))

    def read_error(self) -> dict | None:
        """What `write_error` wrote."""
        return read_json(self.directory / ERROR_FILE) or None


def remove_abandoned(run_directory: Path) -> None:
    """Remove what killed runs left, processes too; waits for who is still ending the last run of `run_directory`."""
    for owner in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER_FILE}"):
        deadline = time.monotonic() + PREVIOUS_RUN_SECONDS
        is_ours = read_json(owner).get("run_directory") == str(run_directory.resolve())
        while not _remove_if_abandoned(owner) and is_ours and owner.exists() and time.monotonic() < deadline:
            time.sleep(0.2)


def _remove_if_abandoned(owner: Path) -> bool:
    try:
        with open(owner) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            json.load(file)
            processes.stop_marked(VARIABLE, str(owner.parent))
            Scratch(owner.parent).remove()
    except (OSError, ValueError):
        return False  # held, another user's, gone, or just being made
    return True


def _remove_shared_memory(before: set[str], until: float) -> None:
    """Remove the user's files that appeared during the run and that no process has mapped: another run of the same
    user has its own mapped.

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
