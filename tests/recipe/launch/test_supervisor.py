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

import psutil
import pytest

from sam_recipe.launch import supervisor
from sam_recipe.launch.config import ConfigError

pytestmark = pytest.mark.e2e

SUPERVISE = """
import sys, threading, time
from pathlib import Path
from sam_recipe.launch.ending import write_last_line
from sam_recipe.launch import supervisor
from sam_recipe.launch.supervisor import lock
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
        ("time.sleep(600)", lambda one: one.children()[0].kill(), 137, r"error: the supervisor \(process "),
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
    assert supervisor.lock_problem(tmp_path) is None


@pytest.mark.parametrize("both", [True, False])
def test_the_next_start_removes_what_is_left_or_waits_for_who_does(tmp_path, both):
    process, mark = start(tmp_path)
    assert f"is used by a run that goes on (process {process.pid}, since " in supervisor.lock_problem(tmp_path)
    killed = [*psutil.Process(process.pid).children() * both, psutil.Process(process.pid)]  # forked, and who forked it
    for one in killed:
        one.suspend()  # neither sees the other die
    for one in killed:
        one.kill()
    process.wait(timeout=30)
    psutil.wait_procs(killed, timeout=10)
    assert not both or (Path((tmp_path / "scratch").read_text()).exists() and Path(f"/dev/shm/psm_{mark}").exists())
    with supervisor.lock(tmp_path):
        assert_nothing_left(tmp_path, mark)


def test_a_lock_keeps_a_second_run_out_and_another_nodes_says_what_to_do(tmp_path):
    directory = tmp_path / "run"
    with supervisor.lock(directory):
        with pytest.raises(ConfigError, match="wait for it, stop it, or choose another run_dir="):
            with supervisor.lock(directory):
                pass
    assert supervisor.lock_problem(directory) is None
    holder = {"pid": 1, "host": "node7", "started": 1.0, "since": "12:00"}
    (directory / supervisor.LOCK_FILE).write_text(json.dumps(holder))
    problem = supervisor.lock_problem(directory)
    assert "is used by a run on node7 (process 1" in problem and f"remove {directory}/running.json" in problem
    (directory / supervisor.LOCK_FILE).write_text("{")
    assert supervisor.lock_problem(directory) is None, "a damaged one is none"


def acquire(semaphore):
    """In a process that is spawned, which opens it by its name."""
    assert semaphore.acquire(timeout=10)


def test_only_shared_memory_that_no_process_has_mapped_is_removed(tmp_path):
    held = supervisor._claim(tmp_path)
    left_behind = Path(f"/dev/shm/psm_left_{time.time_ns()}")
    left_behind.write_text("of a process that was killed")
    shared = SharedMemory(create=True, size=16)
    spawning = multiprocessing.get_context("spawn")
    semaphore = spawning.Semaphore(1)
    # Files of other tests beside this one are taken for some that were there before.
    own = {left_behind, Path("/dev/shm", shared.name), Path(f"/dev/shm/sem.{semaphore._semlock.name.strip('/')}")}
    before = [str(path) for path in Path("/dev/shm").glob("*") if path not in own]
    supervisor._release(tmp_path, {**held, "shared_memory": before})
    assert {path for path in own if path.exists()} == own - {left_behind} and not Path(held["folder"]).exists()
    supervisor._release(tmp_path, held)  # somebody has emptied the temporary directory
    process = spawning.Process(target=acquire, args=(semaphore,))
    process.start()
    process.join()
    shared.close(), shared.unlink()
    assert process.exitcode == 0
