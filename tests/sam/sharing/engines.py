"""Processes that draft and share, and how to wait for what they do."""

import json
import subprocess
import sys
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[3]


class Engine:
    """A process that drafts and shares."""

    def __init__(self, where):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.sam.sharing.engine_process", json.dumps(where)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert json.loads(self.process.stdout.readline()) == "ready"

    def ask(self, what, request="", tokens=()):
        self.process.stdin.write(json.dumps([what, request, list(tokens)]) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def kill(self):
        self.process.kill()
        self.process.wait()


def relays_of(cluster):
    """Numbers of the processes that pass on a run's questions."""
    command = ["-m", "sam.sharing.relay"]
    found = [process.info for process in psutil.process_iter(["pid", "cmdline"])]
    return [one["pid"] for one in found if (line := one["cmdline"] or [])[1:3] == command and cluster.run_id in line]


def until(condition):
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    raise AssertionError("not within a minute")
