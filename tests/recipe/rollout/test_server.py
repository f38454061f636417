"""The rollout server and its worker: a chunk's stop reason, busy seconds, and who goes before an engine on a CPU."""

import asyncio
import logging
import os
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.replica import TokenOutput
from vllm import SamplingParams

from sam.log import LINE
from sam_recipe.rollout import server as module
from sam_recipe.rollout.server import ENGINE_NICE, SpeculationServer, SpeculationWorkerExtension
from tests.sam.test_log import said_by


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


@pytest.mark.parametrize("package", ["sam", "sam_recipe"])
def test_what_vllms_server_imports_does_not_silence_this_project(package, capsys, monkeypatch):
    """vLLM's API server is imported in a run's processes."""
    monkeypatch.delenv("LOG_LEVEL", raising=False)
    monkeypatch.delenv("SAGEMAKER_CONTAINER_LOG_LEVEL", raising=False)
    monkeypatch.setattr(logging.root, "handlers", [])
    level = logging.root.level
    try:
        sys.modules["model_hosting_container_standards.logging_config"].configure_root_logger()
        assert logging.root.level == logging.ERROR, "it leaves the root logger alone: sam/log.py can go"
        assert said_by("another.package", capsys) == []
        (line,) = said_by(package, capsys)
    finally:
        logging.root.setLevel(level)
    assert LINE.fullmatch(line)[1] == f"{package}.part"


@pytest.mark.parametrize(
    ("hints", "finish", "reason"),
    [({"sam_response_limit": 9}, "length", "length"), ({"sam_response_limit": 9}, "stop", "completed"),
     ({}, "length", "completed")],
)  # fmt: skip
def test_only_a_chunk_that_had_its_tokens_ends_by_length(monkeypatch, hints, finish, reason):
    """verl reports `completed` of all of them; the seconds in which a request was there are counted."""

    async def engine(prompt, sampling_params, request_id, **_):
        await asyncio.sleep(0.01)
        yield SimpleNamespace(outputs=[SimpleNamespace(finish_reason=finish)])

    async def verls(self, prompt_ids, sampling_params, request_id, **_):
        async for _ in self.watched(prompt_ids, SamplingParams(**sampling_params), request_id):
            pass
        return TokenOutput(token_ids=[1], stop_reason="completed")

    monkeypatch.setattr(module.vLLMHttpServer, "generate", verls)
    server = object.__new__(SpeculationServer)
    server._in_flight, server._in_engine, server._counted_at, server._busy_seconds = {}, 0, 0.0, 0.0
    server.watched = server._watched(engine)

    async def play():
        return await asyncio.gather(*(server.generate([1], {"extra_args": hints}, name) for name in "ab"))

    assert [output.stop_reason for output in asyncio.run(play())] == [reason] * 2
    assert 0.01 <= server._busy_seconds < 10 and not server._in_flight and not server._in_engine


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
