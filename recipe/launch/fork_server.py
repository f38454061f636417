"""Imports torch, Ray, verl and vLLM once, and forks every other Python process of a run from the process that has.

On a CPU a run has eight processes that import them, one after the other: a hundred seconds of CPU time. Ray starts its
workers, and the rollout server its engine, by the executable that `start` returns (fork_client.py), which hands what it
was started with to this process. Not for accelerators, whose runtimes do not survive a fork.
"""

import contextlib
import fcntl
import gc
import importlib
import json
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import setproctitle

from recipe.launch.processes import terminate_with_parent

EXECUTABLE = "RECIPE_PYTHON_EXECUTABLE"  # what `start` returned, for processes of the run that start others
# Ray's library reads two variables while it is imported. The first job of a Ray is always this one.
FIRST_RAY_JOB = "01000000"
# A process that forks must have one thread: pyarrow's allocator and OpenMP would start others when they are imported.
ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OMP_NUM_THREADS": "1"}
MAX_DESCRIPTORS = 253  # the kernel's limit for one message (SCM_MAX_FD)


def start(folder: Path, modules: list[str], environment: dict[str, str]) -> Path:
    """Start a fork server that ends with this process.

    Args:
        folder: private to the run; gets the socket and the executable.
        modules: imported before the first fork, in this order.
        environment: beyond this process's own; holds what libraries read while they are imported.

    Returns:
        An executable that takes Python's arguments. It waits until all modules are imported. Its exit code is the
        process's, or 1 for one that ends without ending Python: killed, or by os._exit.
    """
    address, executable = folder / "fork", folder / "python"
    client = [sys.executable, "-I", "-S", str(Path(__file__).with_name("fork_client.py")), str(address)]
    executable.write_text(f'#!/bin/sh\nexec {shlex.join(client)} "$@"\n')
    executable.chmod(0o700)
    # Workers end when the raylet does. It is not there yet, but does not outlive this process.
    ray = {"RAY_JOB_ID": FIRST_RAY_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "recipe.launch.fork_server", str(listener.fileno()), *modules],
            env={**os.environ, **environment, **ray, **ONE_THREAD},
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
        )
    return executable


def main() -> None:
    terminate_with_parent()
    with socket.socket(fileno=int(sys.argv[1])) as listener:
        for name in sys.argv[2:]:
            importlib.import_module(name)
        threads = [Path(f"/proc/self/task/{thread}/comm").read_text() for thread in os.listdir("/proc/self/task")]
        if len(threads) > 1:
            # The others would be missing in forked processes. Without a server, every process starts Python anew.
            sys.exit(f"fork server: ends, since an import has started threads: {' '.join(threads)}")
        gc.freeze()  # the pages of what is imported stay shared
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        connection = _accept_and_fork(listener)
    _become(connection)


def _accept_and_fork(listener: socket.socket) -> socket.socket:
    """Returns in forked processes only."""
    while True:
        connection, _ = listener.accept()
        with connection:
            if os.fork() == 0:
                return connection.dup()


def _become(connection: socket.socket) -> None:
    """Take over what the client was started with, run it, and tell the client its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    header, received, _, _ = socket.recv_fds(connection, 8, MAX_DESCRIPTORS)
    request = json.loads(connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL))
    arguments, environment = request["arguments"], request["environment"]
    if environment.get("RAY_JOB_ID", FIRST_RAY_JOB) != FIRST_RAY_JOB:
        return  # the client starts Python anew
    # The received descriptors get the numbers that they have in the client, the connection a free one.
    above = max(request["descriptors"]) + 1
    own, *parked = (fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, above) for one in (connection.detach(), *received))
    os.closerange(0, above)
    for source, target in zip(parked, request["descriptors"], strict=True):
        os.dup2(source, target)
        os.close(source)
    connection = socket.socket(fileno=own)
    if "-c" in arguments:
        # The library looks for the title's memory beside the environment's, at the first call. Not in Ray's workers,
        # whose own copy would then find nothing.
        setproctitle.getproctitle()
    os.environ.clear()
    os.environ.update(environment)
    if "torch" in sys.modules and (threads := environment.get("OMP_NUM_THREADS", "")).isdigit():
        sys.modules["torch"].set_num_threads(int(threads))  # OpenMP and MKL have read ONE_THREAD and do not look again
    os.chdir(request["directory"])
    connection.sendall(os.getpid().to_bytes(8, "big"))
    _run_for(connection, arguments)


def _run_for(connection: socket.socket, arguments: list[str]) -> None:
    """Run what was asked for, until the client ends."""
    running = threading.Event()
    running.set()
    threading.Thread(target=_die_with, args=(connection, running), daemon=True).start()
    code = 1
    try:
        _run(arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        running.clear()
        connection.sendall((code % 256).to_bytes(8, "big"))


def _die_with(client: socket.socket, running: threading.Event) -> None:
    with contextlib.suppress(ConnectionResetError):  # it was killed before it had read all that it was sent
        client.recv(1)  # it sends nothing: this returns when it has ended
    if running.is_set():
        os.kill(os.getpid(), signal.SIGKILL)


def _run(arguments: list[str]) -> None:
    """As the interpreter does: `[options] -c code ...` or `[options] script ...`."""
    while arguments[0].startswith("-") and arguments[0] != "-c":
        del arguments[0]
    if arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = arguments
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main()
