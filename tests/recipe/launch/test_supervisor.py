"""However a run ends, nothing of it stays: processes, shared memory, scratch files; and one run at a time."""

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipe.launch import run_lock, scratch, supervisor
from recipe.launch.config import ConfigError

pytestmark = pytest.mark.e2e

SUPERVISE = """
import sys, threading, time
from pathlib import Path
from recipe.launch.ending import write_last_line
from recipe.launch import supervisor
from recipe.launch.run_lock import lock
supervisor.SCAN_SECONDS, supervisor.GRACE_SECONDS = 0.1, 1.0
directory = Path(sys.argv[1])
def work():
    ending = supervisor.supervise([sys.executable, "-c", sys.argv[2]], directory, {"weight_sync": 1.0})
    write_last_line(directory, ending)
    return ending.code
for _ in range(16):  # as numpy's: they end one after the other when the process is killed
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
with lock(directory):
    code = supervisor.guard(directory, work)
sys.exit(code)
"""
# A child that starts an orphan in a session of its own, leaves shared memory behind, and then does `{then}`.
CHILD = """
import os, subprocess, sys, time
from pathlib import Path
orphan = "import os, time; os.setsid(); time.sleep(600)"
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}, '{mark}'])"
subprocess.Popen([sys.executable, "-c", start]).wait()
Path("/dev/shm/psm_{mark}").write_text("left behind")
Path(os.environ["RECIPE_RUN_SCRATCH"], "ray/session_20{mark}").mkdir(parents=True)
Path("/tmp/rl-colocate-zmq-01000000-20{mark}-replica-0-rank-0.sock").write_text("x")
Path("{directory}", "metrics.jsonl.partial").write_text("half")
print("printed by the run", flush=True)
Path("{directory}", "scratch").write_text(os.environ["RECIPE_RUN_SCRATCH"])
{then}
"""


def start(tmp_path, then="time.sleep(600)"):
    mark = f"sam{os.getpid()}x{time.monotonic_ns()}"
    child = CHILD.replace("{mark}", mark).replace("{then}", then).replace("{directory}", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(tmp_path), child],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a shell without job control starts a command in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    deadline = time.monotonic() + 20
    while not (tmp_path / "scratch").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return process, mark


def assert_nothing_left(tmp_path, mark):
    assert not Path((tmp_path / "scratch").read_text()).exists()
    assert not Path(f"/dev/shm/psm_{mark}").exists()
    assert not list(Path("/tmp").glob(f"rl-colocate-zmq-*{mark}*"))
    assert subprocess.run(["pgrep", "-f", mark], capture_output=True).stdout == b""
    assert not list(tmp_path.glob("*.partial"))
    assert "printed by the run" in (tmp_path / "train.log").read_text()


NEEDED = "subprocess.Popen([{title!r}, '-c', 'import time; time.sleep(2)'], executable=sys.executable); time.sleep(600)"
HANGS = "Path('{directory}', 'state.json').write_text('{\"phase\": \"weight_sync\", \"since\": 1.0}'); time.sleep(600)"


@pytest.mark.parametrize(
    ("then", "act", "code", "said"),
    [
        ("sys.exit(0)", None, 0, "finished after 0 steps"),
        ("sys.exit(3)", None, 3, "error: the run ended with exit code 3, while starting"),
        ("os.kill(os.getpid(), 9)", None, 137, r"error: the run's own process was killed \(signal 9\)"),
        (HANGS, None, 1, r"error: weight_sync has taken more than 1 s \(watchdog.weight_sync_seconds\), in step 1; "),
        (NEEDED.format(title="ray::TaskRunner.run"), None, 1, r"error: the trainer \(process \d+\) was killed or "),
        ("time.sleep(600)", lambda one: one.send_signal(signal.SIGINT), 130, "interrupted, while starting; "),
        ("time.sleep(600)", lambda one: one.terminate(), 130, "interrupted, while starting; "),
        # The forked one clears up for the one that started it, and the other way about.
        ("time.sleep(600)", lambda one: one.kill(), -9, r"error: the supervisor \(process \d+\) was killed"),
        (
            "time.sleep(600)",
            lambda one: one.children()[0].kill(),
            137,
            r"error: the supervisor \(process \d+",
        ),
    ],
)
def test_every_ending_is_said_and_leaves_nothing(tmp_path, then, act, code, said):
    process, mark = start(tmp_path, then)
    if act:
        act(psutil.Process(process.pid))
    (line,) = process.stderr.read().splitlines()  # until both processes have ended
    assert process.wait(timeout=40) == code
    assert re.match(said, line) and f"; log: {tmp_path / 'train.log'}; " in line
    assert (tmp_path / "train.log").read_text().endswith(f" {line}\n")
    assert_nothing_left(tmp_path, mark)
    assert run_lock.lock_problem(tmp_path) is None


def test_the_next_start_removes_what_both_left_when_killed(tmp_path):
    process, mark = start(tmp_path)
    scratch.remove_abandoned(tmp_path / "another_run")
    assert Path((tmp_path / "scratch").read_text()).exists() and process.poll() is None, "it goes on"
    assert f"is used by a run that goes on (process {process.pid}, since " in run_lock.lock_problem(tmp_path)
    both = [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]  # forked, and the one that forked it
    for one in both:
        one.suspend()  # neither sees the other die
    for one in both:
        one.kill()
    process.wait(timeout=30)
    psutil.wait_procs(both, timeout=10)
    assert Path((tmp_path / "scratch").read_text()).exists() and Path(f"/dev/shm/psm_{mark}").exists()
    scratch.remove_abandoned(tmp_path / "another_run")
    assert_nothing_left(tmp_path, mark)


def test_a_lock_keeps_a_second_run_out_and_another_nodes_says_what_to_do(tmp_path):
    directory = tmp_path / "run"
    with run_lock.lock(directory):
        with pytest.raises(ConfigError, match="wait for it, stop it, or choose another run_dir="):
            with run_lock.lock(directory):
                pass
    assert run_lock.lock_problem(directory) is None
    holder = {"pid": 1, "host": "node7", "started": 1.0, "since": "12:00"}
    (directory / run_lock.LOCK_FILE).write_text(json.dumps(holder))
    problem = run_lock.lock_problem(directory)
    assert "is used by a run on node7 (process 1" in problem and f"remove {directory}/running.json" in problem
    (directory / run_lock.LOCK_FILE).write_text("{")
    assert run_lock.lock_problem(directory) is None, "a damaged one is none"


def acquire(semaphore):
    """In a process that is spawned, which opens it by its name."""
    assert semaphore.acquire(timeout=10)


def test_only_shared_memory_that_no_process_has_mapped_is_removed(tmp_path):
    made = scratch.Scratch.create(tmp_path)
    left_behind = Path(f"/dev/shm/psm_left_{time.time_ns()}")
    left_behind.write_text("of a process that was killed")
    shared = SharedMemory(create=True, size=16)
    spawning = multiprocessing.get_context("spawn")
    semaphore = spawning.Semaphore(1)
    # Files of other tests beside this one are taken for some that were there before.
    own = {left_behind, Path("/dev/shm", shared.name), Path(f"/dev/shm/sem.{semaphore._semlock.name.strip('/')}")}
    before = [str(path) for path in Path("/dev/shm").glob("*") if path not in own]
    made.owner.write_text(json.dumps({"run_directory": str(tmp_path), "since": 0.0, "shared_memory": before}))
    made.remove()
    assert {path for path in own if path.exists()} == own - {left_behind} and not made.directory.exists()
    made.touch(), made.remove()  # somebody has emptied the temporary directory
    process = spawning.Process(target=acquire, args=(semaphore,))
    process.start()
    process.join()
    shared.close(), shared.unlink()
    assert process.exitcode == 0


ENGINE, WORKER = "the vLLM engine", "a worker of the trainer"
GONE = "RuntimeError: every response failed in round 1 of step 3: data_source 'x': a.py:1: EngineDeadError: gone"


@pytest.mark.parametrize(
    ("text", "after", "said"),
    [
        ("ValueError: wrong", -0.2, "ValueError: wrong"),  # processes end because of an exception
        ("ValueError: wrong", 5.0, f"{WORKER} (process 6) was"),  # one may come from a process that died
        (GONE, -0.2, f"{ENGINE} (process 7) was"),  # a killed engine fails its requests sooner than a look notices
    ],
)
def test_what_came_first_is_the_cause(tmp_path, text, after, said):
    error = {"type": "RayTaskError", "text": text, "at": 1000.0 + after}
    watch = supervisor.Watch(None, tmp_path, {}, SimpleNamespace(read_error=lambda: error))
    watch.dead, watch.died_at = {WORKER: f"{WORKER} (process 6)", ENGINE: f"{ENGINE} (process 7)"}, 1000.0
    assert watch.failed(1).reason.startswith(said)


def test_a_death_that_no_look_has_seen_is_named_by_the_exception(tmp_path):
    gone = subprocess.Popen(["true"])
    dead = psutil.Process(gone.pid)
    gone.wait()
    watch = supervisor.Watch(None, tmp_path, {}, SimpleNamespace(read_error=lambda: error))
    watch.needed = {dead: ENGINE}
    error = {"type": "RayTaskError", "text": GONE, "at": 1000.0}
    assert watch.failed(1).reason.startswith(f"{ENGINE} (process {gone.pid}) was")
