"""Imports torch, Ray, verl and vLLM once, and forks every other Python process of a run from the process that has.

On a CPU a run has eight processes that import them: a hundred seconds of CPU time. Ray starts its workers, and the
rollout server its engine, by the executable that `start` returns: this file again, as a client, which hands to the
server what it was started with and ends as the forked process ends. Where no server answers, it becomes the Python that
was asked for. Not for accelerators, whose runtimes do not survive a fork.
"""

import ctypes
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
from contextlib import suppress
from pathlib import Path

EXECUTABLE = "RECIPE_PYTHON_EXECUTABLE"  # what `start` returned, for processes of the run that start others
# Ray's library reads two variables while it is imported. The first job of a Ray always has this number.
FIRST_RAY_JOB = "01000000"
# pyarrow's allocator and OpenMP would start threads when they are imported, which a process that forks must not have.
ONE_THREAD = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "OMP_NUM_THREADS": "1"}
PR_SET_PDEATHSIG = 1  # linux/prctl.h
MAX_DESCRIPTORS = 253  # the kernel's limit for one message (SCM_MAX_FD)


def start(folder: Path, modules: list[str], environment: dict[str, str]) -> Path:
    """Start a fork server that ends with this process, in a private folder, and imports `modules` in this order.

    `environment`, beyond this process's own, holds what libraries read while they are imported.

    Returns:
        An executable that takes Python's arguments. It exits with the code of the process, or 1 for one that ends
        without ending Python: killed, or by os._exit.
    """
    address = folder / "fork"
    executable = folder / "python"
    client = shlex.join([sys.executable, "-I", "-S", __file__, str(address)])  # by path: it starts in milliseconds
    executable.write_text(f'#!/bin/sh\nexec {client} "$@"\n')
    executable.chmod(0o700)
    # Workers end when the raylet does. It is not there yet, but does not outlive this process.
    ray = {"RAY_JOB_ID": FIRST_RAY_JOB, "RAY_RAYLET_PID": str(os.getpid())}
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(address))
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "recipe.sam_dapo.launch.fork_server", str(listener.fileno()), *modules],
            env=os.environ | environment | ray | ONE_THREAD, stdin=subprocess.DEVNULL, pass_fds=[listener.fileno()],
        )  # fmt: skip
    return executable


def _client(address: str, arguments: list[str]) -> int:
    """Have a process forked; returns its exit code. With the standard library alone."""
    descriptors = [int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")]
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    message = json.dumps({**request, "descriptors": descriptors}).encode() + b"\n"
    connection = socket.socket(socket.AF_UNIX)
    numbers = connection.makefile("r")  # without any where the other side has ended, as when it is killed
    process = ""
    with suppress(OSError):
        connection.connect(address)
        socket.send_fds(connection, [b"\n"], descriptors)
        connection.sendall(message)
        process = numbers.readline()
    if not process:
        os.execv(sys.executable, [sys.executable, *arguments])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: os.kill(int(process), number))
    return int(numbers.readline() or 1)


def _serve(listener: socket.socket, modules: list[str]) -> socket.socket:
    """Import, then fork for every client; returns its connection, in forked processes only."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    for name in modules:
        importlib.import_module(name)
    if len(os.listdir("/proc/self/task")) > 1:
        # They would be missing in forked processes. Without a server, every process starts Python anew.
        sys.exit("fork server: ends, since an import has started threads")
    gc.freeze()  # the pages of what is imported stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return connection
        connection.close()


def _become(connection: socket.socket) -> None:
    """Take over what the client was started with, and run it."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _, received, _, _ = socket.recv_fds(connection, 1, MAX_DESCRIPTORS)
    request = json.loads(connection.makefile("rb").readline())
    arguments = request["arguments"]
    environment = request["environment"]
    connection = _with_numbers_of_client(connection, received, request["descriptors"])
    # As the interpreter takes them: `[options] -c code ...` or `[options] script ...`.
    while arguments[0] != "-c" and arguments[0].startswith("-"):
        del arguments[0]
    is_code = arguments[0] == "-c"
    if is_code:
        # The library looks for the title's memory beside the environment's, at the first call. Not in Ray's workers,
        # whose own copy would then find nothing.
        importlib.import_module("setproctitle").getproctitle()
    os.environ.clear()
    os.environ.update(environment)
    threads = environment.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and threads.isdigit():
        sys.modules["torch"].set_num_threads(int(threads))  # OpenMP and MKL have read ONE_THREAD and do not look again
    os.chdir(request["directory"])
    connection.sendall(f"{os.getpid()}\n".encode())
    ended = threading.Event()
    threading.Thread(target=_die_with, args=(connection, ended), daemon=True).start()
    sys.argv = arguments
    code = 1
    try:
        if is_code:
            source = arguments.pop(1)
            exec(compile(source, "<string>", "exec"), {"__name__": "__main__"})
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    finally:
        ended.set()
        connection.sendall(f"{code % 256}\n".encode())


def _with_numbers_of_client(connection: socket.socket, received: list[int], numbers: list[int]) -> socket.socket:
    """Give the received descriptors the numbers that they have in the client, and the connection a free one."""
    above = max(numbers) + 1
    moved = fcntl.fcntl(connection.detach(), fcntl.F_DUPFD_CLOEXEC, above)
    parked = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, above) for descriptor in received]
    os.closerange(0, above)
    for source, target in zip(parked, numbers, strict=True):
        os.dup2(source, target)
        os.close(source)
    return socket.socket(fileno=moved)


def _die_with(client: socket.socket, ended: threading.Event) -> None:
    with suppress(ConnectionResetError):  # it was killed before it had read all that it was sent
        client.recv(1)  # it sends nothing: this returns when it has ended
    if not ended.is_set():
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    if __package__:  # started as a module: the server
        _become(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
    else:
        sys.exit(_client(sys.argv[1], sys.argv[2:]))
