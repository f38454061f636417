"""Runs a command and leaves nothing behind: processes, shared memory, sockets, temporary files.

verl, Ray and vLLM start dozens of processes in sessions of their own, which outlive a killed driver; a vLLM
process that dies during a weight sync makes verl wait for ever. So the run is started below a process that adopts its
orphans (PR_SET_CHILD_SUBREAPER), watches it, and clears up however it ends. That process is forked from the user's
(`guard`): if one of the two is killed, the other clears up; if both were, the next start in that directory does.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from recipe.launch import resources
from recipe.launch.ending import ERROR_FILE, LOG_FILE, Ending, failed, is_death, role_of, who_died, write_last_line
from recipe.record.run_directory import LOCK_FILE, STATE_FILE, read_json

POLL_SECONDS = 0.25  # looking at the processes known to be needed
SCAN_SECONDS = 2.0  # looking for new ones, some thirty, costs a few milliseconds
MEMORY_SECONDS = 30.0  # a look takes half a second of CPU and more: the kernel walks the pages of some thirty processes
GRACE_SECONDS = 8.0  # verl may notice by itself that a process died, and say more about it


class Orphaned(KeyboardInterrupt):
    """The process that the user started was killed."""


def _orphaned(*_) -> None:
    raise Orphaned


STOPS = (signal.SIGINT, signal.SIGTERM)
# Not one of these: of a parent with several threads the kernel may tell while the last of them still ends, and until
# then the parent is the parent.
ORPHANED = signal.SIGUSR1
# A shell without job control starts background commands with SIGINT ignored; here it always means to stop.
HANDLERS = {**dict.fromkeys(STOPS, signal.default_int_handler), ORPHANED: _orphaned}


def _handle_signals(ignore: bool = False) -> None:
    for number, handler in HANDLERS.items():
        signal.signal(number, signal.SIG_IGN if ignore else handler)


def guard(run_directory: Path, work: Callable[[], int]) -> int:
    """Do `work`, which calls `supervise` and returns an exit code, in a forked process that gets this one's signals."""
    resources.adopt_orphans()
    sys.stdout.flush()
    own = os.getpid()
    if not (forked := os.fork()):
        os.setsid()
        _handle_signals()
        code = 1
        try:
            resources.terminate_with_parent(ORPHANED)
            code = work() if os.getppid() == own else 137
        except KeyboardInterrupt:
            code = 130
        except BaseException:
            traceback.print_exc()
        finally:
            with suppress(OSError):
                sys.stdout.flush()
            os._exit(code)

    def pass_on(number, _) -> None:
        with suppress(ProcessLookupError):
            os.kill(forked, number)

    for number in STOPS:
        signal.signal(number, pass_on)
    code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    if code >= 0:
        return code
    resources.stop()
    resources.release(run_directory, read_json(run_directory / LOCK_FILE))
    write_last_line(run_directory, Ending(128 - code, f"the supervisor (process {forked}) was killed"))
    return 128 - code


def supervise(
    command: list[str],
    run_directory: Path,
    phase_limits: dict[str, float],
    origin: Path | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> Ending:
    """Run `command` to its end and clear up after it, below `guard`; calls `on_poll` a few times a second.

    The environment variable recipe.launch.resources.VARIABLE names a private folder to it; its output is appended to
    train.log. A phase in state.json may last `phase_limits` seconds. `origin` is the checkpoint that it loads.

    Returns:
        How it ended, with the command's exit code; 130 after Ctrl-C, 1 when the watchdog stopped it.
    """
    resources.adopt_orphans()
    (run_directory / STATE_FILE).unlink(missing_ok=True)
    parent, held, watch = os.getppid(), resources.claim(run_directory), Watch(run_directory, phase_limits)
    environment = {**os.environ, resources.VARIABLE: held["folder"]}
    hopeless = None
    try:
        with open(run_directory / LOG_FILE, "ab") as log:
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        while (code := _exit_code(child)) is None and not (hopeless := watch.why_hopeless()):
            with suppress(OSError):  # a terminal that was closed
                on_poll()
        with suppress(OSError):
            on_poll()
        if code == 0:
            return Ending(0)
        if hopeless and not watch.dead:
            return Ending(1, hopeless)
        error = read_json(Path(held["folder"], ERROR_FILE)) or None
        # Only of a death: at its end a run ends them all.
        dead = watch.dead or (watch.find_dead() if error and is_death(error) else {})
        return failed(code or 1, who_died(dead, watch.died_at, error), error, run_directory, origin)
    except Orphaned:
        return Ending(137, f"the supervisor (process {parent}) was killed")
    except KeyboardInterrupt:
        return Ending(130, "interrupted")
    finally:
        _handle_signals(ignore=True)  # a second Ctrl-C must not stop the clearing up
        resources.stop()
        resources.release(run_directory, held)
        watch.write_peak_memory()
        _handle_signals()


def _exit_code(child: subprocess.Popen) -> int | None:
    """Wait for a poll's time; above 128 when a signal ended it."""
    with suppress(subprocess.TimeoutExpired):
        code = child.wait(timeout=POLL_SECONDS)
        return code if code >= 0 else 128 - code
    return None


class Watch:
    """Looks whether a run can only hang: a process that it needs has died, or a phase takes too long.

    dead: what the first look that found any has found, names by role; died_at: when, in seconds since the epoch.
    """

    def __init__(self, run_directory: Path, phase_limits: dict[str, float]):
        self.run_directory, self.phase_limits = run_directory, phase_limits
        self.needed: dict[psutil.Process, str] = {}
        self.dead: dict[str, str] = {}
        self.died_at = 0.0
        self._seen_before: set[psutil.Process] = set()
        self._peak_memory = 0  # bytes
        self._next_scan = self._next_memory = 0.0

    def why_hopeless(self) -> str | None:
        """One look, a few times a second; why waiting has no sense, if it has none."""
        if time.monotonic() >= self._next_scan:
            self._next_scan = time.monotonic() + SCAN_SECONDS
            self._scan()
        state = read_json(self.run_directory / STATE_FILE)
        phase, since = state.get("phase"), state.get("since", time.time())
        limit = self.phase_limits.get(phase)
        if limit is not None and time.time() - since > limit:
            return f"{phase} has taken more than {limit:.0f} s (watchdog.{phase}_seconds)"
        if phase == "finished":
            return None
        if not self.dead and (dead := self.find_dead()):
            self.dead, self.died_at = dead, time.time()
        is_over = self.dead and time.time() - self.died_at > GRACE_SECONDS
        return next(iter(self.dead.values())) if is_over else None

    def find_dead(self) -> dict[str, str]:
        """The needed processes that have ended, a name by role."""
        dead = [(role, process.pid) for process, role in self.needed.items() if not resources.is_alive(process)]
        return {role: f"{role} (process {pid})" for role, pid in dead}

    def _scan(self) -> None:
        """Look for needed processes, by two looks in a row: what an engine starts bears its title for a moment too,
        between fork and exec."""
        with suppress(OSError):
            os.utime(self.run_directory / LOCK_FILE)  # for recipe.launch.resources.release
        found = resources.descendants()
        roles = {process: role for process in found if (role := role_of(_title(process)))}
        self.needed |= {process: roles[process] for process in roles.keys() & self._seen_before}
        self._seen_before = set(roles)
        if time.monotonic() >= self._next_memory:
            self._next_memory = time.monotonic() + MEMORY_SECONDS
            self._peak_memory = max(self._peak_memory, sum(map(_memory, found)))

    def write_peak_memory(self) -> None:
        """Peak of the processes' proportional set sizes (shared pages counted once), in GiB."""
        content = {"peak_memory_gib": round(self._peak_memory / 2**30, 2)}
        with suppress(OSError):  # the disk may be full
            (self.run_directory / "peak_memory.json").write_text(json.dumps(content))


def _title(process: psutil.Process) -> str:
    """The first word of its command line, which Ray and vLLM set with setproctitle; empty for a process that ended."""
    with suppress(psutil.Error, IndexError):
        return process.cmdline()[0]
    return ""


def _memory(process: psutil.Process) -> int:
    """Proportional set size in bytes: pages that several processes share are divided among them."""
    with suppress(psutil.Error, OSError):
        return process.memory_full_info().pss
    return 0
