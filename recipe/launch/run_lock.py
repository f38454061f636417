"""One run at a time in a run's directory: two would write the same checkpoints and metrics."""

import contextlib
import datetime
import json
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import psutil

from recipe.launch.config import ConfigError
from recipe.record import LOCK_FILE, read_json


def lock_problem(run_directory: Path) -> str | None:
    """Why no run may start in a directory: another holds it. None if its holder was killed on this node."""
    path = run_directory / LOCK_FILE
    holder = read_json(path)
    pid, host, started, since = map(holder.get, ("pid", "host", "started", "since"))
    if None in (pid, host, started, since):
        return None
    if host != platform.node():
        return (
            f"run_dir={run_directory} is used by a run on {host} (process {pid}, since {since}): stop it there, choose "
            f"another run_dir=, or, if that node has died, remove {path}"
        )
    with contextlib.suppress(psutil.Error):
        if psutil.Process(pid).create_time() == started:
            return (
                f"run_dir={run_directory} is used by a run that goes on (process {pid}, since {since}): wait for it, "
                "stop it, or choose another run_dir="
            )
    return None


@contextlib.contextmanager
def lock(run_directory: Path) -> Iterator[None]:
    """Hold a run's directory.

    Raises:
        ConfigError: another run holds it.
    """
    if problem := lock_problem(run_directory):
        raise ConfigError(problem)
    run_directory.mkdir(parents=True, exist_ok=True)
    path = run_directory / LOCK_FILE
    path.unlink(missing_ok=True)  # of a run that was killed
    holder = {
        "pid": os.getpid(),
        "host": platform.node(),
        "started": psutil.Process().create_time(),
        "since": datetime.datetime.now().isoformat(sep=" ", timespec="seconds"),
    }
    try:
        with open(path, "x") as file:
            json.dump(holder, file)
    except FileExistsError:
        problem = f"run_dir={run_directory}: another run started there at this moment: choose another"
        raise ConfigError(problem) from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
