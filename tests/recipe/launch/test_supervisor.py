"""However a run ends, nothing of it stays: processes, shared memory, scratch files."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from recipe.launch import processes, supervisor
from recipe.launch.scratch import Scratch, remove_abandoned

pytestmark = pytest.mark.e2e

SUPERVISE = """
import sys
from pathlib import Path
from types import SimpleNamespace
from recipe.launch.ending import write_last_line
from recipe.launch.supervisor import supervise
ending = supervise([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), {"weight_sync": 1.0})
write_last_line(Path(sys.argv[1]), ending)
sys.exit(ending.code)
"""
# A child that starts an orphan in a session of its own, leaves shared memory behind, and then does `{then}`.
CHILD = """
import os, subprocess, sys, time
from pathlib import Path
from types import SimpleNamespace
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


def start(tmp_path, then):
    mark = f"sam{os.getpid()}x{time.monotonic_ns()}"
    child = CHILD.replace("{mark}", mark).replace("{directory}", str(tmp_path)).replace("{then}", then)
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


def last_line(process, tmp_path):
    """The only one on the screen: where the log is, and how to go on."""
    (line,) = process.stderr.read().splitlines()
    assert f"; log: {tmp_path / 'train.log'}; " in line
    assert (tmp_path / "train.log").read_text().endswith(f" {line}\n")
    return line


@pytest.mark.parametrize(
    "then, code, said",
    [
        ("sys.exit(0)", 0, "finished after 0 steps"),
        ("sys.exit(3)", 3, "error: the run ended with exit code 3"),
        ("os.kill(os.getpid(), 9)", 137, "error: the run's own process was killed (signal 9)"),
    ],
)
def test_end_and_failure(tmp_path, then, code, said):
    process, mark = start(tmp_path, then)
    assert process.wait(timeout=30) == code
    assert_nothing_left(tmp_path, mark)
    assert (tmp_path / "peak_memory.json").exists()
    assert last_line(process, tmp_path).startswith(said)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(tmp_path, sign):
    process, mark = start(tmp_path, "time.sleep(600)")
    process.send_signal(sign)
    assert process.wait(timeout=30) == 130
    assert_nothing_left(tmp_path, mark)
    assert last_line(process, tmp_path).startswith("interrupted, while starting; ")


def test_a_killed_supervisor_is_replaced_by_its_guardian(tmp_path):
    process, mark = start(tmp_path, "time.sleep(600)")
    (tmp_path / "running.json").write_text(json.dumps({"pid": process.pid}))
    process.kill()
    # Its standard error closes when the guardian has ended too.
    assert last_line(process, tmp_path).startswith(f"error: the supervisor (process {process.pid}) was killed")
    assert_nothing_left(tmp_path, mark)
    assert not (tmp_path / "running.json").exists()


def test_a_killed_guardian_is_replaced_by_the_supervisor(tmp_path):
    process, mark = start(tmp_path, "time.sleep(600)")
    (guardian,) = psutil.Process(process.pid).children()
    guardian.kill()
    assert process.wait(timeout=30) == 137
    assert_nothing_left(tmp_path, mark)


def test_the_next_start_removes_what_both_left_when_killed(tmp_path):
    process, mark = start(tmp_path, "time.sleep(600)")
    both = [*psutil.Process(process.pid).children(), psutil.Process(process.pid)]
    for one in both:
        one.suspend()  # neither sees the other die
    for one in both:
        one.kill()
    psutil.wait_procs(both, timeout=10)
    scratch = Path((tmp_path / "scratch").read_text())
    process.wait(timeout=30)
    assert scratch.exists() and Path(f"/dev/shm/psm_{mark}").exists()
    remove_abandoned(tmp_path / "another_run")
    assert_nothing_left(tmp_path, mark)


def test_a_temporary_directory_that_somebody_emptied_ends_nothing(tmp_path):
    scratch = Scratch.create(tmp_path)
    shutil.rmtree(scratch.directory)
    scratch.touch()
    scratch.remove()
    assert not scratch.directory.exists()


def test_a_run_that_goes_on_is_not_removed(tmp_path):
    process, mark = start(tmp_path, "time.sleep(600)")
    remove_abandoned(tmp_path / "another_run")
    assert Path((tmp_path / "scratch").read_text()).exists() and process.poll() is None
    process.terminate()
    assert process.wait(timeout=30) == 130


def test_hanging_weight_sync(tmp_path):
    hang = (
        "Path('{directory}', 'state.json').write_text('{\"phase\": \"weight_sync\", \"since\": 1.0}'); time.sleep(600)"
    )
    process, mark = start(tmp_path, hang.replace("{directory}", str(tmp_path)))
    assert process.wait(timeout=30) == 1
    assert "weight_sync has taken more than 1 s (watchdog.weight_sync_seconds), in step 1;" in process.stderr.read()
    assert_nothing_left(tmp_path, mark)


@pytest.mark.parametrize(
    "title, role", [("VLLM::EngineCore", "the vLLM engine"), ("ray::TaskRunner.run", "the trainer")]
)
def test_a_process_that_the_run_needs_died(tmp_path, title, role):
    needed = "import time; time.sleep(7)"
    then = f"subprocess.Popen([{title!r}, '-c', {needed!r}], executable=sys.executable); time.sleep(600)"
    process, mark = start(tmp_path, then)
    assert process.wait(timeout=40) == 1
    assert re.match(
        rf"error: {role} \(process \d+\) was killed or crashed, while starting", last_line(process, tmp_path)
    )
    assert_nothing_left(tmp_path, mark)


@pytest.mark.parametrize("exception_after, said", [(-0.2, "ValueError: wrong"), (5.0, "the trainer (process 7) was")])
def test_what_came_first_is_the_cause(tmp_path, exception_after, said):
    """Processes end because of an exception, and an exception may come from a process that died."""
    error = {"type": "RayTaskError", "text": "ValueError: wrong", "at": 1000.0 + exception_after}
    watch = supervisor.Watch(None, tmp_path, {}, SimpleNamespace(read_error=lambda: error))
    watch.dead, watch._died_at = {"the trainer": "the trainer (process 7)"}, 1000.0
    assert watch._failed(1).reason.startswith(said)


class Process:
    """As psutil's, of one that has ended."""

    def __init__(self, pid: int):
        self.pid = pid

    def is_running(self) -> bool:
        return False


def test_responses_that_failed_because_of_the_engine_are_a_consequence(tmp_path):
    """A killed engine fails its requests at once, sooner than a look at the processes may notice it."""
    text = "RuntimeError: every response failed in round 1 of step 3: data_source 'x': a.py:1: EngineDeadError: gone"
    error = {"type": "RayTaskError(RuntimeError)", "text": text, "at": 999.8}
    watch = supervisor.Watch(None, tmp_path, {}, SimpleNamespace(read_error=lambda: error))
    # On a busy machine what ended because of the engine is found dead with it.
    worker, engine = "a worker of the trainer", "the vLLM engine"
    watch.dead, watch._died_at = {worker: f"{worker} (process 6)", engine: f"{engine} (process 7)"}, 1000.0
    assert watch._failed(1).reason.startswith("the vLLM engine (process 7) was")
    watch.dead, watch.needed = {}, {Process(8): worker, Process(9): engine}
    assert watch._failed(1).reason.startswith("the vLLM engine (process 9) was"), "the run ended before a look"
    error["text"] = "RuntimeError: every response failed: ActorDiedError: it died. class_name: SpeculationServer pid: 3"
    watch.needed[Process(10)] = "a rollout server"
    assert watch._failed(1).reason.startswith("a rollout server (process 10) was"), "of Ray's lines put into one"


def test_a_title_seen_once_is_no_engine(tmp_path, monkeypatch):
    """A program that an engine starts has the engine's title between fork and exec, and may end a second later."""
    Process = namedtuple("Process", "pid")
    forked, engine, living = Process(1), Process(2), {1, 2}
    monkeypatch.setattr(processes, "title", lambda process: "VLLM::EngineCore")
    monkeypatch.setattr(processes, "alive", lambda process: process.pid in living)
    monkeypatch.setattr(supervisor, "GRACE_SECONDS", -1.0)
    watch = supervisor.Watch(None, tmp_path, {}, None)
    watch._note_needed([forked, engine])
    living.remove(1)
    for _ in range(2):
        watch._note_needed([engine])
        assert watch._why_hopeless() is None
    living.clear()
    assert watch._why_hopeless() == "the vLLM engine (process 2)"
