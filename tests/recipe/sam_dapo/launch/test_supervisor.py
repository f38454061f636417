"""However a run ends, nothing of it stays: processes, shared memory, scratch files; and one run at a time."""

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

from recipe.sam_dapo.launch import supervisor
from recipe.sam_dapo.launch.config import ConfigError

pytestmark = pytest.mark.e2e

SUPERVISE = """
import sys, threading, time
from pathlib import Path
from recipe.sam_dapo.launch.screen import write_last_line
from recipe.sam_dapo.launch import supervisor
supervisor.SCAN_SECONDS, supervisor.GRACE_SECONDS = 0.1, 1.0
directory = Path(sys.argv[1])
for _ in range(16):  # as numpy's: they end one after the other when the process is killed
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
with supervisor.lock(directory):
    ending = supervisor.supervise([sys.executable, "-c", sys.argv[2]], directory, 1.0, None, lambda: None)
    write_last_line(directory, ending)
sys.exit(ending.code)
"""
# A child that starts an orphan in a session of its own, leaves shared memory behind, and then does `{then}`.
CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from recipe.sam_dapo.launch import supervisor
orphan = "import os, time; os.setsid(); time.sleep(600)"
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}, '{mark}'])"
with supervisor.supervised(Path("{directory}")):
    subprocess.Popen([sys.executable, "-c", start]).wait()
    Path("/dev/shm/psm_{mark}").write_text("left behind")
    session = Path(os.environ["RECIPE_RUN_SCRATCH"]).name
    Path(f"/tmp/rl-colocate-zmq-01000000-{session}-replica-0-rank-0.sock").write_text("x")
    Path("{directory}", "metrics.jsonl.partial").write_text("half")
    print("printed by the run", flush=True)
    Path("{directory}", "scratch").write_text(os.environ["RECIPE_RUN_SCRATCH"])
    {then}
"""


def start(folder, then="time.sleep(600)"):
    """A supervisor whose child has not begun yet, and the mark of what that will leave."""
    folder.mkdir()
    mark = f"sam{os.getpid()}x{time.monotonic_ns()}"
    child = CHILD.replace("{mark}", mark).replace("{then}", then).replace("{directory}", str(folder))
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, str(folder), child],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # As a shell without job control starts a command in the background.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    return process, mark


def wait_for_child(folder):
    deadline = time.monotonic() + 60
    while not (folder / "scratch").exists() and time.monotonic() < deadline:
        time.sleep(0.05)


def assert_nothing_left(folder, mark):
    assert not (scratch := Path((folder / "scratch").read_text())).exists()
    assert not Path(f"/dev/shm/psm_{mark}").exists()
    assert not list(Path("/tmp").glob(f"rl-colocate-zmq-*{scratch.name}*"))
    assert subprocess.run(["pgrep", "-f", mark], capture_output=True).stdout == b""
    assert not list(folder.glob("*.partial"))
    assert "printed by the run" in (folder / "train.log").read_text()


NEEDED = "subprocess.Popen([{title!r}, '-c', 'import time; time.sleep(2)'], executable=sys.executable); time.sleep(600)"
HANGS = "Path('{directory}', 'state.json').write_text('{\"phase\": \"weight_sync\", \"since\": 1.0}'); time.sleep(600)"
# What the child does, what is done to the supervisor, its exit code, and how its last line begins.
ENDINGS = (
    ("sys.exit(0)", None, 0, "finished after 0 steps"),
    ("sys.exit(3)", None, 3, "error: the run ended with exit code 3, while starting"),
    ("os.kill(os.getpid(), 9)", None, 137, r"error: the run's own process was killed \(signal 9\)"),
    (HANGS, None, 1, r"error: weight_sync has taken more than 1 s \(watchdog.weight_sync_seconds\), in step 1; "),
    (NEEDED.format(title="ray::TaskRunner.run"), None, 1, r"error: the trainer \(process \d+\) was killed or "),
    ("time.sleep(600)", signal.SIGTERM, 130, "interrupted, while starting; "),
    ("time.sleep(600)", signal.SIGINT, 130, "interrupted, while starting; "),
    ("time.sleep(600)", signal.SIGKILL, -9, r"error: the supervisor \(process \d+\) was killed"),
)


def test_however_a_run_ends_its_last_line_says_why_and_nothing_is_left(tmp_path):
    """Of runs side by side."""
    started = [(tmp_path / str(number), *start(tmp_path / str(number), row[0])) for number, row in enumerate(ENDINGS)]
    for (folder, process, _), (_, signal_, _, _) in zip(started, ENDINGS, strict=True):
        wait_for_child(folder)
        if signal_:
            process.send_signal(signal_)
    for (folder, process, mark), (_, _, code, said) in zip(started, ENDINGS, strict=True):
        (line,) = process.stderr.read().splitlines()  # until all processes have ended
        assert process.wait(timeout=40) == code
        assert re.match(said, line) and f"; log: {folder / 'train.log'}; " in line
        assert (folder / "train.log").read_text().endswith(f" {line}\n")
        assert_nothing_left(folder, mark)
        with supervisor.lock(folder):
            pass


def acquire(semaphore):
    """In a process that is spawned, which opens it by its name."""
    assert semaphore.acquire(timeout=10)


def test_one_run_at_a_time_and_the_next_start_removes_what_a_killed_one_has_left_and_nothing_else(tmp_path):
    (before := Path(f"/dev/shm/psm_before_{time.time_ns()}")).write_text("of another program")
    process, mark = start(folder := tmp_path / "run")
    wait_for_child(folder)
    said = f"is used by a run that goes on .process {process.pid} on .*: wait for it, stop it, choose another run_dir="
    with pytest.raises(ConfigError, match=said), supervisor.lock(folder):
        pass
    killed = [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]
    for one in killed:
        one.suspend()  # neither sees the other die
    for one in killed:
        one.kill()
    process.wait(timeout=30)
    psutil.wait_procs(killed, timeout=10)
    assert Path((folder / "scratch").read_text()).exists() and Path(f"/dev/shm/psm_{mark}").exists()
    # Of a run beside it.
    shared, spawning = SharedMemory(create=True, size=16), multiprocessing.get_context("spawn")
    semaphore = spawning.Semaphore(1)
    with supervisor.lock(folder):
        assert_nothing_left(folder, mark)
    assert before.exists() and Path("/dev/shm", shared.name).exists()
    opening = spawning.Process(target=acquire, args=(semaphore,))
    opening.start()
    opening.join()
    before.unlink(), shared.close(), shared.unlink()
    assert opening.exitcode == 0
