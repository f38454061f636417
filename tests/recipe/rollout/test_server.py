"""The rollout server and its worker: busy seconds, and who goes before an engine on a CPU."""

import asyncio
import os
import threading
from types import SimpleNamespace

import torch
from vllm import SamplingParams

from sam_recipe.rollout import server as module
from sam_recipe.rollout.server import ENGINE_NICE, SpeculationServer, SpeculationWorkerExtension


def priority_after(calls: int, threads: int, monkeypatch, before: int = 0) -> int:
    """The nice value of an engine's thread that yields; each has its own on Linux, and the test's stays as it is."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    found, own = [], os.getpriority(os.PRIO_PROCESS, 0)

    def run():
        os.setpriority(os.PRIO_PROCESS, 0, max(before, own))
        for _ in range(calls):
            SpeculationWorkerExtension.sam_yield(SimpleNamespace(device=torch.device("cpu")))
        found.append(os.getpriority(os.PRIO_PROCESS, 0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    return found[0]


def test_an_engine_of_one_thread_yields(monkeypatch):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert priority_after(2, 1, monkeypatch) == max(own, ENGINE_NICE)
    assert priority_after(1, 1, monkeypatch, before=19) == 19, "never forward"
    assert priority_after(1, 2, monkeypatch) == own


def test_seconds_count_in_the_engine_also_of_a_batch_that_never_empties(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    async def engine(prompt, sampling_params, request_id):
        for seconds in (2.0, 3.0):
            now[0] += seconds
            yield SimpleNamespace(outputs=[])

    async def record(method):
        return [b""]

    server = object.__new__(SpeculationServer)
    server._in_flight, server._in_engine, server._counted_at, server._busy_seconds = {}, 0, 0.0, 0.0
    server.engine = SimpleNamespace(collective_rpc=record)

    async def play():
        found, generated = [], server._watched(engine)([1], SamplingParams(), "a")
        for _ in range(2):
            await anext(generated)
            found.append((await server.take_rollout_record())[1])
        assert await anext(generated, None) is None
        now[0] += 5.0  # a request that waits in the server for new weights
        return [*found, (await server.take_rollout_record())[1]]

    assert asyncio.run(play()) == [2.0, 3.0, 0.0]
