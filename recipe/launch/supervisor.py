"""Runs a command and leaves nothing behind: processes, shared memory, sockets, temporary files.

verl, Ray and vLLM start dozens of processes in sessions of their own, which outlive a killed driver; a vLLM
process that dies during a weight sync makes verl wait for ever. So the run is started below a process that adopts its
orphans (PR_SET_CHILD_SUBREAPER), watches it, and clears up however it ends. That process is forked from the user's
(`guard`): if one of the two is killed, the other clears up; if both were, the next start does (recipe.launch.scratch).
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

from recipe.launch import processes
from recipe.launch.ending import LOG_FILE, Ending, failed, is_death, role_of, role_said, write_last_line
from recipe.launch.scratch import VARIABLE, Scratch, remove_abandoned
from recipe.record.run_directory import STATE_FILE, read_json

POLL_SECONDS = 0.25  # looking at the processes known to be needed
SCAN_SECONDS = 2.0  # looking for new ones, some thirty, costs a few milliseconds
MEMORY_SECONDS = 30.0  # a look takes half a second of CPU and more: the kernel walks the pages of some thirty processes
CONSEQUENCE_SECONDS = 0.5  # an exception that ends the run, later than this after a process died, is a consequence
GRACE_SECONDS = 8.0  # verl may notice by itself that a process died, and say more about it
STOPS = (signal.SIGINT, signal.SIGTERM)
# Not one of these: of a parent with several threads the kernel may tell while the last of them still ends, and until
# then the parent is the parent.
ORPHANED = signal.SIGUSR1


class Orphaned(KeyboardInterrupt):
    """The process that the user started was killed."""


def guard(run_directory: Path, work: Callable[[], int]) -> int:
    """Do `work`, which calls `supervise` and returns an exit code, in a forked process that gets this one's signals."""
    processes.adopt_orphans()
    sys.stdout.flush()
    own = os.getpid()
    if not (forked := os.fork()):
        os.setsid()
        signal.signal(signal.SIGTERM, _interrupt)
        # A shell without job control starts background commands with SIGINT ignored; here it always means to stop.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(ORPHANED, _orphaned)
        code = 1
        try:
            processes.terminate_with_parent(ORPHANED)
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

    before = {number: signal.signal(number, pass_on) for number in STOPS}
    code = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    if code < 0:
        processes.stop()
        remove_abandoned(run_directory)
        write_last_line(run_directory, Ending(128 - code, f"the supervisor (process {forked}) was killed"))
    for number, handler in before.items():
        signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def supervise(
    command: list[str],
    run_directory: Path,
    phase_limits: dict[str, float],
    origin: Path | None = None,
    on_poll: Callable[[], None] = lambda: None,
) -> Ending:
    """Run `command` to its end and clear up after it, below `guard`; calls `on_poll` a few times a second.

    It is started with recipe.launch.scratch.VARIABLE naming a private directory that is removed afterwards. Its output
    is appended to train.log in the run directory. A phase in state.json may last as many seconds as `phase_limits` say.
    `origin` is the checkpoint that it loads.

    Returns:
        How it ended, with the command's exit code; 130 after Ctrl-C, 1 when the watchdog stopped it.
    """
    processes.adopt_orphans()
    remove_abandoned(run_directory)
    (run_directory / STATE_FILE).unlink(missing_ok=True)
    parent, scratch = os.getppid(), Scratch.create(run_directory)
    environment = {**os.environ, VARIABLE: str(scratch.directory)}
    watch = None
    try:
        with open(run_directory / LOG_FILE, "ab") as log:
            child = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        watch = Watch(child, run_directory, phase_limits, scratch, origin)
        return watch.until_end(on_poll)
    except Orphaned:
        return Ending(137, f"the supervisor (process {parent}) was killed")
    except KeyboardInterrupt:
        return Ending(130, "interrupted")
    finally:
        for number in (*STOPS, ORPHANED):
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the clearing up
        processes.stop()
        scratch.remove()
        if watch:
            watch.write_peak_memory()
        signal.signal(signal.SIGTERM, _interrupt)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(ORPHANED, _orphaned)


class Watch:
    """Waits for the child; ends the wait when the run can only hang."""

    def __init__(self, child, run_directory: Path, phase_limits: dict[str, float], scratch: Scratch, origin=None):
        self.child, self.run_directory, self.phase_limits = child, run_directory, phase_limits
        self.scratch, self.origin = scratch, origin
        self.needed: dict[psutil.Process, str] = {}
        self.dead: dict[str, str] = {}  # name by role: what was dead in the first look that found any
        self.died_at = 0.0  # seconds, epoch
        self._seen_before: set[psutil.Process] = set()
        self._peak_memory = 0
        self._next_scan = self._next_memory = 0.0

    def until_end(self, on_poll: Callable[[], None]) -> Ending:
        """How the child ended, or why waiting for it is hopeless."""
        while (code := self._wait()) is None:
            with suppress(OSError):  # a terminal that was closed
                on_poll()
            if time.monotonic() >= self._next_scan:
                self._next_scan = time.monotonic() + SCAN_SECONDS
                self._scan()
            if reason := self._why_hopeless():
                return self.failed(1) if self.dead else Ending(1, reason)
        with suppress(OSError):
            on_poll()
        return self.failed(code) if code else Ending(0)

    def failed(self, code: int) -> Ending:
        """The ending of a run that failed, by what died and by the exception that it wrote, whichever was first."""
        error = self.scratch.read_error()
        # Only of a death: at its end a run ends them all.
        dead = self.dead or (self._find_dead() if error and is_death(error) else {})
        if error and self.died_at > error["at"] - CONSEQUENCE_SECONDS and not is_death(error):
            dead = {}  # they ended because of the exception
        died = dead.get(role_said(error["text"]) if error else None) or next(iter(dead.values()), None)
        return failed(code, died, error, self.run_directory, self.origin)

    def _find_dead(self) -> dict[str, str]:
        dead = [(role, process.pid) for process, role in self.needed.items() if not processes.alive(process)]
        return {role: f"{role} (process {pid})" for role, pid in dead}

    def _wait(self) -> int | None:
        try:
            code = self.child.wait(timeout=POLL_SECONDS)
        except subprocess.TimeoutExpired:
            return None
        return code if code >= 0 else 128 - code

    def _scan(self) -> None:
        """Look for needed processes, by two looks in a row: what an engine starts bears its title for a moment too,
        between fork and exec."""
        found = processes.descendants(keep=self.child.pid)
        self.scratch.touch()
        roles = {process: role for process in found if (role := role_of(_title(process)))}
        self.needed |= {process: roles[process] for process in roles.keys() & self._seen_before}
        self._seen_before = set(roles)
        if time.monotonic() >= self._next_memory:
            self._next_memory = time.monotonic() + MEMORY_SECONDS
            self._peak_memory = max(self._peak_memory, sum(map(_memory, found)))

    def _why_hopeless(self) -> str | None:
        state = read_json(self.run_directory / STATE_FILE)
        phase, since = state.get("phase"), state.get("since", time.time())
        limit = self.phase_limits.get(phase)
        if limit is not None and time.time() - since > limit:
            return f"{phase} has taken more than {limit:.0f} s (watchdog.{phase}_seconds)"
        if phase == "finished":
            return None
        if not self.dead and (dead := self._find_dead()):
            self.dead, self.died_at = dead, time.time()
        is_over = self.dead and time.time() - self.died_at > GRACE_SECONDS
        return next(iter(self.dead.values())) if is_over else None

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


def _interrupt(*_) -> None:
    raise KeyboardInterrupt


def _orphaned(*_) -> None:
    raise Orphaned
