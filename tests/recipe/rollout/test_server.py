"""The rollout server and its worker: busy seconds, and who goes before an engine on a CPU."""

import asyncio
import os
from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams

from sam_recipe.rollout import server as module
from sam_recipe.rollout.server import ENGINE_NICE, SpeculationServer, SpeculationWorkerExtension


@pytest.mark.parametrize(
    ("threads", "before", "after"),
    [(1, 0, ENGINE_NICE), (1, 19, 19), (2, 0, 0)],
    ids=["yields", "never forward", "not"],
)
def test_an_engine_of_one_thread_yields(monkeypatch, threads, before, after):
    nice = {0: before}  # of the thread that calls
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(os, "getpriority", lambda _, thread: nice[thread])
    monkeypatch.setattr(os, "setpriority", lambda _, thread, value: nice.update({thread: value}))
    for _ in range(2):
        SpeculationWorkerExtension.sam_yield(SimpleNamespace(device=torch.device("cpu")))
    assert nice == {0: after}


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
