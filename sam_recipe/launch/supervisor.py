"""Runs a command alone in a directory and leaves nothing behind: processes, shared memory, sockets, temporary files.

verl, Ray and vLLM start dozens of processes in sessions of their own, which outlive a killed driver; a vLLM
process that dies during a weight sync makes verl wait for ever. So the run is started below a process that adopts its
orphans (PR_SET_CHILD_SUBREAPER), watches it, and clears up however it ends. That process is forked from the user's
(`guard`): if one of the two is killed, the other clears up; if both were, the next start does. running.json in the
directory says who holds it, and what there is to be removed.
"""

import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from sam_recipe.launch import checkpoints
from sam_recipe.launch.config import ConfigError
from sam_recipe.launch.ending import ERROR_FILE, LOG_FILE, Ending, failed, is_death, role_of, who_died, write_last_line
from sam_recipe.record import LOCK_FILE, STATE_FILE, read_json

VARIABLE = "RECIPE_RUN_SCRATCH"  # names a private folder to the processes of the run
SHARED_MEMORY = Path("/dev/shm")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_SECONDS = 0.25  # looking at the processes known to be needed
SCAN_SECONDS = 2.0  # looking for new ones, some thirty, costs a few milliseconds
GRACE_SECONDS = 8.0  # verl may notice by itself that a process died, and say more about it
TERMINATE_SECONDS = 6.0
PREVIOUS_RUN_SECONDS = 60.0


class Orphaned(KeyboardInterrupt):
    """The process that the user started was killed."""


STOPS = (signal.SIGINT, signal.SIGTERM)
# No look at the parent's number tells: of a parent with several threads the last may still end, under that number.
ORPHANED = signal.SIGUSR1


def _stop_once(number: int, _) -> None:
    """Raise, and let what comes later, while this is being dealt with, pass: the kernel sends ORPHANED each time that
    a thread of the parent ends."""
    _handle_signals(ignore=True)
    raise Orphaned if number == ORPHANED else KeyboardInterrupt


def _handle_signals(ignore: bool = False) -> None:
    # A shell without job control starts background commands with SIGINT ignored; here it always means to stop.
    for number in (*STOPS, ORPHANED):
        signal.signal(number, signal.SIG_IGN if ignore else _stop_once)


def terminate_with_parent(sign: int = signal.SIGTERM) -> None:
    """Let the kernel send a signal to this process when its parent dies, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(sign), 0, 0, 0)


def _adopt_orphans() -> None:
    """Processes below this one whose parent dies become its children, in whatever session they are."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


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
    """Hold a run's directory, after what a killed run has left is removed.

    Raises:
        ConfigError, FileExistsError: another run holds it.
    """
    if problem := lock_problem(run_directory):
        raise ConfigError(problem)
    run_directory.mkdir(parents=True, exist_ok=True)
    path, deadline = run_directory / LOCK_FILE, time.monotonic() + PREVIOUS_RUN_SECONDS
    while _is_running(read_json(path).get("supervisor", {})) and time.monotonic() < deadline:
        time.sleep(0.2)  # it is still clearing up
    _release(run_directory, read_json(path))
    path.unlink(missing_ok=True)
    with open(path, "x") as file:  # fails where another run has started at this moment
        since = time.strftime("%Y-%m-%d %H:%M:%S")
        json.dump({**_this_process(), "host": platform.node(), "since": since}, file)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def guard(run_directory: Path, work: Callable[[], int]) -> int:
    """Do `work`, which calls `supervise` and returns an exit code, in a forked process that gets this one's signals."""
    _adopt_orphans()
    sys.stdout.flush()
    own = os.getpid()
    if not (forked := os.fork()):
        os.setsid()
        _handle_signals()
        code = 1
        try:
            terminate_with_parent(ORPHANED)
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
    _stop(_descendants)
    _release(run_directory, read_json(run_directory / LOCK_FILE))
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

    The environment variable VARIABLE names a private folder to it; its output is appended to train.log. A phase in
    state.json may last `phase_limits` seconds. `origin` is the checkpoint that it loads.

    Returns:
        How it ended, with the command's exit code; 130 after Ctrl-C, 1 when the watchdog stopped it.
    """
    _adopt_orphans()
    _handle_signals()  # the clearing up after an earlier one has ignored them
    (run_directory / STATE_FILE).unlink(missing_ok=True)
    parent, watch, held, hopeless = os.getppid(), Watch(run_directory, phase_limits), {}, None
    try:
        held = _claim(run_directory)
        with open(run_directory / LOG_FILE, "ab") as log:
            environment = {**os.environ, VARIABLE: held["folder"]}
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
        _stop(_descendants)
        _release(run_directory, held)


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
        self._next_scan = 0.0

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
        dead = [(role, process.pid) for process, role in self.needed.items() if not _is_alive(process)]
        return {role: f"{role} (process {pid})" for role, pid in dead}

    def _scan(self) -> None:
        """Look for needed processes, by two looks in a row: what an engine starts bears its title for a moment too,
        between fork and exec. Ray and vLLM set titles, the first word of a command line, with setproctitle."""
        with suppress(OSError):
            os.utime(self.run_directory / LOCK_FILE)  # for _release
        roles = {}
        for process in _descendants():
            with suppress(psutil.Error, OSError, IndexError):
                if role := role_of(process.cmdline()[0]):
                    roles[process] = role
        self.needed |= {process: roles[process] for process in roles.keys() & self._seen_before}
        self._seen_before = set(roles)


def _claim(run_directory: Path) -> dict:
    """Make a private folder, and note in running.json what `_release` takes; this process is the run's supervisor."""
    folder = tempfile.mkdtemp(prefix="sam-")  # a short path: socket names may have 107 characters
    present = sorted(map(str, SHARED_MEMORY.glob("*")))
    held = {"supervisor": _this_process(), "folder": folder, "began": time.time(), "shared_memory": present}
    (path := run_directory / LOCK_FILE).write_text(json.dumps(read_json(path) | held))
    return held


def _release(run_directory: Path, held: dict) -> None:
    """End the processes of a run, and remove its folder, sockets, shared memory and half-written files."""
    if not (folder := held.get("folder")) or not Path(folder).exists():
        return

    def of_this_run() -> list[psutil.Process]:
        every = psutil.process_iter(["environ"])
        return [process for process in every if (process.info["environ"] or {}).get(VARIABLE) == folder]

    _stop(of_this_run)
    checkpoints.remove_unfinished(run_directory, held["began"])
    for partial in (*run_directory.glob("*.partial*"), *run_directory.glob("*/*.partial*")):
        partial.unlink(missing_ok=True)
    with suppress(OSError):  # what appears long after the supervisor's last look at the run is not the run's
        until = (run_directory / LOCK_FILE).stat().st_mtime + PREVIOUS_RUN_SECONDS
        _remove_shared_memory(set(held["shared_memory"]), until)
    # verl's own (sam_recipe.trainer.workers), always in /tmp: a run killed in a weight sync leaves them there.
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


def _stop(find: Callable[[], list[psutil.Process]]) -> None:
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


def _descendants() -> list[psutil.Process]:
    """The processes below this one that run, adopted orphans included."""
    return [process for process in psutil.Process().children(recursive=True) if _is_alive(process)]


def _is_alive(process: psutil.Process) -> bool:
    """Whether it runs: a zombie does not."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _this_process() -> dict:
    return {"pid": os.getpid(), "started": psutil.Process().create_time()}


def _is_running(noted: dict) -> bool:
    """Whether a process that `_this_process` noted is still there, not another of its number."""
    with suppress(psutil.Error, KeyError):
        return _is_alive(process := psutil.Process(noted["pid"])) and process.create_time() == noted["started"]
    return False
