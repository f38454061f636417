"""One run at a time in a directory."""

import json
import os
import platform
import subprocess
import sys

import psutil
import pytest

from recipe.launch import run_lock
from recipe.launch.config import ConfigError


def write_lock(directory, **changes):
    holder = {"pid": os.getpid(), "host": platform.node(), "started": psutil.Process().create_time(), "since": "12:00"}
    (directory / run_lock.LOCK_FILE).write_text(json.dumps(holder | changes))


def test_a_lock_keeps_a_second_run_out_and_goes_with_the_first(tmp_path):
    directory = tmp_path / "run"
    with run_lock.lock(directory):
        assert f"run_dir={directory} is used by a run that goes on (process {os.getpid()}, since " in (
            run_lock.lock_problem(directory)
        )
        with pytest.raises(ConfigError, match="wait for it, stop it, or choose another run_dir="):
            with run_lock.lock(directory):
                pass
    assert run_lock.lock_problem(directory) is None and list(directory.iterdir()) == []


@pytest.mark.parametrize("changes", [{"pid": 2**22 + 1}, {"started": 1.0}])
def test_a_run_that_was_killed_leaves_no_lock_behind(tmp_path, changes):
    write_lock(tmp_path, **changes)
    with run_lock.lock(tmp_path):
        assert json.loads((tmp_path / run_lock.LOCK_FILE).read_text())["pid"] == os.getpid()


def test_another_nodes_lock_says_what_to_do_if_that_node_has_died(tmp_path):
    write_lock(tmp_path, host="node7")
    problem = run_lock.lock_problem(tmp_path)
    assert "is used by a run on node7 (process" in problem and f"remove {tmp_path}/running.json" in problem


def test_a_damaged_lock_is_none(tmp_path):
    (tmp_path / run_lock.LOCK_FILE).write_text("{")
    assert run_lock.lock_problem(tmp_path) is None


def test_two_processes(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from recipe.launch.run_lock import lock\n"
        "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "held\n"
        assert f"(process {process.pid}, since" in run_lock.lock_problem(tmp_path)
        process.kill()
    assert run_lock.lock_problem(tmp_path) is None
