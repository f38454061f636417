"""Processes that the fork server starts behave as Python started anew."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sam_recipe.launch import fork_server

SLEEP = "import os, sys, time; print(os.getpid(), flush=True); time.sleep(60)"


@pytest.fixture
def start(tmp_path):
    """Starts a fork server that imports `modules`; returns the executable and the server's process."""
    before = set(psutil.Process().children())

    def started(*modules, **environment):
        executable = fork_server.start(tmp_path, list(modules), environment)
        (server,) = set(psutil.Process().children()) - before
        return executable, server

    yield started
    for process in set(psutil.Process().children()) - before:
        process.kill()
        process.wait()


@pytest.fixture
def python(start):
    return start("decimal")[0]


def run(python, *arguments, **options):
    return subprocess.run([python, *arguments], capture_output=True, text=True, timeout=60, **options)


def gone(pid):
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_forked_process_is_what_its_client_was_started_as(python, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "print(sys.argv[1:], os.getcwd(), os.environ['GIVEN'], 'LEFT_OUT' in os.environ, sys.stdin.read(), __name__)\n"
        "print('decimal' in sys.modules, os.read(int(sys.argv[1]), 9), file=sys.stderr)\n"
    )
    reader, writer = os.pipe()
    os.write(writer, b"from pipe")
    environment = {"GIVEN": "environment", "PATH": os.environ["PATH"]}
    os.environ["LEFT_OUT"] = "of this one"
    result = run(
        *(python, "-u", str(script), str(reader), "-x"),
        **{"input": "text", "cwd": tmp_path, "env": environment, "pass_fds": [reader]},
    )
    del os.environ["LEFT_OUT"]
    os.close(reader), os.close(writer)
    assert result.stdout == f"['{reader}', '-x'] {tmp_path} environment False text __main__\n"
    assert result.stderr == "True b'from pipe'\n"
    assert result.returncode == 0


def test_exit_codes(python):
    for code, status, error in (
        ("import sys; sys.exit(3)", 3, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit('a reason')", 1, "a reason\n"),
        ("int('x')", 1, "ValueError: invalid literal for int() with base 10: 'x'\n"),
        ("import os; os.kill(os.getpid(), 9)", 1, ""),
    ):
        result = run(python, "-c", code)
        assert result.returncode == status
        assert result.stderr.endswith(error) and bool(result.stderr) == bool(error)


def test_a_signal_to_the_client_ends_the_forked_process(python):
    for sign in (signal.SIGTERM, signal.SIGKILL):
        client = subprocess.Popen([python, "-c", SLEEP], stdout=subprocess.PIPE, text=True)
        pid = int(client.stdout.readline())
        assert pid != client.pid and psutil.pid_exists(pid)
        client.send_signal(sign)
        assert gone(pid)
        client.wait(timeout=10)
        client.stdout.close()


@pytest.mark.parametrize("why", ["killed", "threads"])
def test_without_a_server_python_starts_anew(start, capfd, tmp_path, monkeypatch, why):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "with_thread.py").write_text(
        "import threading, time; threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    )
    python, server = start("with_thread" if why == "threads" else "decimal")
    if why == "killed":
        server.kill()
    result = run(python, "-c", "import sys; print('sam_recipe' in sys.modules, sys.argv); sys.exit(5)", "x")
    assert (result.stdout, result.stderr, result.returncode) == ("False ['-c', 'x']\n", "", 5)
    assert ("fork server: ends, since an import has started threads" in capfd.readouterr().err) == (why == "threads")


def test_a_server_ends_with_the_process_that_started_it(tmp_path):
    code = "import sys; from pathlib import Path; from sam_recipe.launch import fork_server;"
    code += "print(fork_server.start(Path(sys.argv[1]), [], {}), flush=True); input()"
    starter = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    python = starter.stdout.readline().strip()
    assert run(python, "-c", "import sys; print('sam_recipe' in sys.modules)").stdout == "True\n"
    (server,) = psutil.Process(starter.pid).children()
    starter.kill()
    starter.wait()
    starter.stdin.close(), starter.stdout.close()
    assert gone(server.pid)
