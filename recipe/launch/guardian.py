"""`python -m recipe.launch.guardian SUPERVISOR SCRATCH RUN_DIRECTORY COMMAND...`: stands between supervisor and run.

A supervisor that is killed clears up nothing. The kernel tells this process, which then does it in its place: it has
adopted the run's orphans as well. A guardian that is killed leaves them to the supervisor. The run knows of neither.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from recipe.launch import processes
from recipe.launch.ending import LOG_FILE, Ending, write_last_line
from recipe.launch.scratch import VARIABLE, Scratch
from recipe.record.run_directory import LOCK_FILE, read_json


class SupervisorGone(Exception):
    """Raised by the signal handler, wherever this process is."""


def main(arguments: list[str]) -> int:
    supervisor, scratch, run_directory = int(arguments[0]), Scratch(Path(arguments[1])), Path(arguments[2])

    def look(*_) -> None:
        # The supervisor sends SIGTERM too, to end what runs below it: this process ends when the run has.
        if os.getppid() != supervisor:
            raise SupervisorGone

    for sign in (signal.SIGINT, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, look)
    processes.adopt_orphans()
    processes.terminate_with_parent()
    scratch.hold()
    try:
        look()
        return _run(arguments[3:], scratch, run_directory)
    except SupervisorGone:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    processes.stop_descendants()
    scratch.remove()
    with suppress(OSError):
        lock = run_directory / LOCK_FILE
        if read_json(lock).get("pid") == supervisor:  # otherwise the next run has taken the directory already
            lock.unlink()
    write_last_line(run_directory, Ending(137, f"the supervisor (process {supervisor}) was killed"))
    return 137


def _run(command: list[str], scratch: Scratch, run_directory: Path) -> int:
    environment = {**os.environ, VARIABLE: str(scratch.directory)}
    with open(run_directory / LOG_FILE, "ab") as log:
        child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    while True:
        pid, status = os.wait()  # an adopted orphan, or the run
        if pid == child.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
