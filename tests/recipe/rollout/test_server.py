"""The rollout server's worker, where an engine shares its cores with the servers."""

import os
import threading

import torch

from recipe.rollout.server import ENGINE_NICE, yield_to_control_plane


def priority_after(calls: int, threads: int, monkeypatch, before: int = 0) -> int:
    """The nice value of a thread that yields; each has its own on Linux, and the test's stays as it is."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found = []

    def run():
        os.setpriority(os.PRIO_PROCESS, 0, max(before, own))
        for _ in range(calls):
            yield_to_control_plane()
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    own = os.getpriority(os.PRIO_PROCESS, 0)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    return found[0]


def test_an_engine_of_one_thread_yields(monkeypatch):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert priority_after(2, 1, monkeypatch) == max(own, ENGINE_NICE)
    assert priority_after(1, 1, monkeypatch, before=15) == 15, "never forward"
    assert priority_after(1, 2, monkeypatch) == own
