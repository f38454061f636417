"""The rollout server: busy seconds."""

import asyncio
from types import SimpleNamespace

from vllm import SamplingParams

from sam_recipe.rollout import server as module
from sam_recipe.rollout.server import SpeculationServer


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
