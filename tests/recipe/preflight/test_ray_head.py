"""Where a run may start: on its cluster's head, and once in its directory."""

import json
import os
import platform
import socket
import subprocess
import sys

import psutil
import pytest

from recipe.launch.config import ConfigError, compose_config
from recipe.preflight import ray_head


@pytest.fixture
def head(tmp_path, monkeypatch):
    """Something that listens where Ray's head would, and Ray's note of it."""
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    note = tmp_path / "ray" / "ray_current_cluster"
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        note.write_text(address)
        yield address
    note.unlink()


def found(name="dapo_qwen3_32b", *overrides):
    return list(ray_head.find_problems(compose_config(name, list(overrides))))


def test_the_head_may_start_a_run(head, monkeypatch):
    for address in (head, "auto", f"ray://{head}"):
        monkeypatch.setenv("RAY_ADDRESS", address)
        assert found() == []


def test_a_run_of_one_node_needs_no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert found("dapo_qwen3_32b", "trainer.nnodes=1") == found("dapo_tiny_cpu") == []


def test_a_cluster_that_the_run_was_not_told_of(head):
    assert found() == [
        f"trainer.nnodes=2 and a Ray cluster runs at {head}, but RAY_ADDRESS is not set: start the run with its script "
        f"in scripts/, or export RAY_ADDRESS={head}"
    ]
    assert ray_head.cluster_of_this_node() == head


def test_a_note_of_a_ray_that_was_killed_counts_for_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    (tmp_path / "ray" / "ray_current_cluster").write_text(address)
    assert ray_head.cluster_of_this_node() is None
    assert "no Ray runs on this node" in found()[0]
    monkeypatch.setenv("RAY_ADDRESS", address)
    assert "nothing answers there" in found()[0]


def test_this_node_and_others():
    assert all(map(ray_head.is_here, ("127.0.0.1", "localhost", "[::1]")))
    assert not any(map(ray_head.is_here, ("198.51.100.7", "no-such-host.invalid")))


def write_lock(directory, **changes):
    holder = {"pid": os.getpid(), "host": platform.node(), "started": psutil.Process().create_time(), "since": "12:00"}
    (directory / ray_head.LOCK_FILE).write_text(json.dumps(holder | changes))


def test_a_lock_keeps_a_second_run_out_and_goes_with_the_first(tmp_path):
    directory = tmp_path / "run"
    with ray_head.lock(directory):
        assert f"run_dir={directory} is used by a run that goes on (process {os.getpid()}, since " in (
            ray_head.lock_problem(directory)
        )
        with pytest.raises(ConfigError, match="wait for it, stop it, or choose another run_dir="):
            with ray_head.lock(directory):
                pass
    assert ray_head.lock_problem(directory) is None and list(directory.iterdir()) == []


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": 1.0}])
def test_a_run_that_was_killed_leaves_no_lock_behind(tmp_path, changes):
    write_lock(tmp_path, **changes)
    with ray_head.lock(tmp_path):
        assert json.loads((tmp_path / ray_head.LOCK_FILE).read_text())["pid"] == os.getpid()


def test_another_nodes_lock_says_what_to_do_if_that_node_has_died(tmp_path):
    write_lock(tmp_path, host="node7")
    problem = ray_head.lock_problem(tmp_path)
    assert "is used by a run on node7 (process" in problem and f"remove {tmp_path}/running.json" in problem


def test_a_damaged_lock_is_none(tmp_path):
    (tmp_path / ray_head.LOCK_FILE).write_text("{")
    assert ray_head.lock_problem(tmp_path) is None


def test_two_processes(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from recipe.preflight.ray_head import lock\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert f"(process {process.pid}, since" in ray_head.lock_problem(tmp_path)
        process.kill()
    assert ray_head.lock_problem(tmp_path) is None
