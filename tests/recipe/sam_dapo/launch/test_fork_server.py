"""Processes that the fork server starts behave as Python started anew."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from recipe.sam_dapo.launch import fork_server

START = """
import sys
from pathlib import Path
from recipe.sam_dapo.launch import fork_server
print(fork_server.start(Path(sys.argv[1]), sys.argv[2:], {}), flush=True)
input()
"""
SLEEP = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"
IS_FORKED = "import sys; print('recipe.sam_dapo' in sys.modules)"
CODES = (
    ("import sys; sys.exit(3)", 3, ""),
    ("raise SystemExit", 0, ""),
    ("raise SystemExit('a reason')", 1, "a reason\n"),
    ("int('x')", 1, "ValueError: invalid literal for int() with base 10: 'x'\n"),
    ("import os; os.kill(os.getpid(), 9)", 1, ""),
)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The executable of a server that this process has started."""
    before = set(psutil.Process().children())
    yield fork_server.start(tmp_path_factory.mktemp("fork"), ["decimal"], {})
    (server,) = set(psutil.Process().children()) - before
    server.kill()
    server.wait()


def run(python, *arguments, **options):
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, **options)


def gone(pid):
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_forked_process_has_its_clients_words_folder_environment_and_input(python, tmp_path):
    """Descriptors too, by which Ray's workers talk: without them no run would start."""
    code = (
        "import os, sys\n"
        "print(sys.argv, os.getcwd(), os.environ['GIVEN'], 'OMP_NUM_THREADS' in os.environ)\n"
        "print(sys.stdin.read(), __name__, 'decimal' in sys.modules)"
    )
    result = run(python, "-c", code, "-x", input="text", cwd=tmp_path, env={"GIVEN": "this"})
    assert result.stdout == f"['-c', '-x'] {tmp_path} this False\ntext __main__ True\n"


def test_exit_codes_and_signals(python):
    for code, status, error in CODES:
        result = run(python, "-c", code)
        assert result.returncode == status
        assert result.stderr.endswith(error) and bool(result.stderr) == bool(error)
    for sign in (signal.SIGTERM, signal.SIGKILL):  # to the client
        with subprocess.Popen([python, "-c", SLEEP], stdout=subprocess.PIPE, text=True) as client:
            pid = int(client.stdout.readline())
            assert pid != client.pid and psutil.pid_exists(pid)
            client.send_signal(sign)
            assert gone(pid)


@pytest.mark.parametrize("modules", [(), ("with_thread",)])
def test_a_server_ends_with_its_starter_or_with_threads_and_then_python_starts_anew(tmp_path, monkeypatch, modules):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    thread = "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    (tmp_path / "with_thread.py").write_text(thread)
    command, pipes = [sys.executable, "-c", START, str(tmp_path), *modules], {"stdin": subprocess.PIPE}
    starter = subprocess.Popen(command, **pipes, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    python = starter.stdout.readline().strip()
    (server,) = psutil.Process(starter.pid).children()
    assert run(python, "-c", IS_FORKED).stdout == f"{not modules}\n"
    starter.kill()
    _, said = starter.communicate()
    assert gone(server.pid) and ("fork server: ends, since an import has started threads" in said) == bool(modules)
    result = run(python, "-c", "import sys; print('recipe.sam_dapo' in sys.modules, sys.argv); sys.exit(5)", "x")
    assert (result.stdout, result.stderr, result.returncode) == ("False ['-c', 'x']\n", "", 5)
