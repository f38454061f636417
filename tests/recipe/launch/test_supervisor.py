"""However a run ends, nothing of it stays: processes, shared memory, scratch files."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from recipe.launch import supervisor

SUPERVISE = """
import sys
from pathlib import Path
from recipe.launch.supervisor import supervise
sys.exit(supervise([sys.executable, "-c", sys.argv[2]], Path(sys.argv[1]), "SCRATCH", {"weight_sync": 1.0}))
"""
# A child that starts an orphan in a session of its own, leaves shared memory behind, and then does `{then}`.
CHILD = """
import os, subprocess, sys, time
from pathlib import Path
orphan = "import os, time; os.setsid(); time.sleep(600)"
start = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {orphan!r}, '{mark}'])"
subprocess.Popen([sys.executable, "-c", start]).wait()
Path("/dev/shm/psm_{mark}").write_text("left behind")
Path(os.environ["SCRATCH"], "ray/session_20{mark}").mkdir(parents=True)
Path("/tmp/rl-colocate-zmq-01000000-20{mark}-replica-0-rank-0.sock").write_text("x")
Path("{directory}", "scratch").write_text(os.environ["SCRATCH"])
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
    assert (tmp_path / "peak_memory.json").exists()


@pytest.mark.parametrize("then, code", [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_end_and_failure(tmp_path, then, code):
    process, mark = start(tmp_path, then)
    assert process.wait(timeout=30) == code
    assert_nothing_left(tmp_path, mark)


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_interrupt(tmp_path, sign):
    process, mark = start(tmp_path, "time.sleep(600)")
    process.send_signal(sign)
    assert process.wait(timeout=30) == 130
    assert_nothing_left(tmp_path, mark)


def test_hanging_weight_sync(tmp_path):
    hang = (
        "Path('{directory}', 'state.json').write_text('{\"phase\": \"weight_sync\", \"since\": 1.0}'); time.sleep(600)"
    )
    process, mark = start(tmp_path, hang.replace("{directory}", str(tmp_path)))
    assert process.wait(timeout=30) == 1
    assert "weight_sync has taken more than 1 s (watchdog.weight_sync_seconds)" in process.stderr.read()
    assert_nothing_left(tmp_path, mark)


def test_dead_engine(tmp_path, monkeypatch):
    engine = "import time; time.sleep(7)"
    then = f"subprocess.Popen(['VLLM::EngineCore', '-c', {engine!r}], executable=sys.executable); time.sleep(600)"
    process, mark = start(tmp_path, then)
    assert process.wait(timeout=40) == 1
    assert "died; stopping the run" in process.stderr.read()
    assert_nothing_left(tmp_path, mark)


def test_a_title_seen_once_is_no_engine(tmp_path, monkeypatch):
    """A program that an engine starts has the engine's title between fork and exec, and may end a second later."""
    forked, engine = SimpleNamespace(pid=1), SimpleNamespace(pid=2)
    alive = {1, 2}
    monkeypatch.setattr(supervisor, "_is_engine", lambda process: True)
    monkeypatch.setattr(supervisor, "_alive", lambda process: process.pid in alive)
    monkeypatch.setattr(supervisor, "ENGINE_GRACE_SECONDS", -1.0)
    watch = supervisor.Watch(None, tmp_path, {})
    assert watch._why_hopeless([forked, engine]) is None
    alive.remove(1)
    assert [watch._why_hopeless([engine]) for _ in range(3)] == [None] * 3
    alive.clear()
    assert watch._why_hopeless([]) == "vLLM process 2 died"
