"""Stands in for `python`: recipe.launch.fork_server forks the process that was asked for, and this one ends as it ends.

Run by path, with the standard library alone, so that it starts in milliseconds. Where no fork server answers, it
becomes the Python that was asked for.
"""

import json
import os
import signal
import socket
import sys


def open_descriptors() -> list[int]:
    """All but the listing's own, which is closed again when it is looked at."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            os.fstat(int(name))
            found.append(int(name))
        except OSError:
            continue
    return found


def main() -> None:
    descriptors = open_descriptors()
    connection = socket.socket(socket.AF_UNIX)
    request = {"arguments": sys.argv[2:], "environment": dict(os.environ), "directory": os.getcwd()}
    message = json.dumps({**request, "descriptors": descriptors}).encode()
    process = b""
    try:
        connection.connect(sys.argv[1])
        socket.send_fds(connection, [len(message).to_bytes(8, "big")], descriptors)
        connection.sendall(message)
        process = connection.recv(8, socket.MSG_WAITALL)
    except OSError:
        pass
    if not process:
        connection.close()
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: os.kill(int.from_bytes(process, "big"), number))
    # The kernel closes the connection of a process that is killed.
    sys.exit(int.from_bytes(connection.recv(8, socket.MSG_WAITALL) or b"\1", "big"))


main()
