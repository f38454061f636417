"""The router's actor around the routing policy, with servers that are asked for their limits only."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest

from recipe.sam_dapo.rollout.router import AHEAD, ContextRouter, RoutedRequest
from sam.drafting.drafter import Drafter
from sam.drafting.texts import digest
from sam.history.client import HistoryClient

LIMITS = {"kv_tokens": 4096, "block_tokens": 16, "slots": 2, "max_model_len": 512}
ROOM = LIMITS["slots"] + AHEAD


def server(**changed):
    async def limits():
        return LIMITS | changed

    return SimpleNamespace(routing_limits=SimpleNamespace(remote=limits))


def router(*servers, chunk_tokens=None, history=None, **limits) -> ContextRouter:
    settings = {"chunk_tokens": chunk_tokens, "lookahead_tokens": 0, "history": history}
    return ContextRouter({name: server(**limits) for name in servers}, settings)


def request(name: str, group: str = "g") -> RoutedRequest:
    return RoutedRequest(name, group, 8, 64, name)


def run(play):
    return asyncio.run(asyncio.wait_for(play, 20))


def test_lengths_in_the_history_are_the_estimate_before_the_probe(tmp_path):
    """With the file that engines write, and the names that the client gives groups."""
    prompts = {length: [7, length] for length in (50, 5, 20, 40, 30, 10)}
    history = HistoryClient(tmp_path / "history", "1f", 1 << 40, 9)
    history.start()
    for length, prompt in prompts.items():
        history.request_started(f"{length}", prompt, Drafter(max_draft_tokens=3))
        history.request_finished(f"{length}", list(range(length)))
    history.stop()

    async def play(folder):
        made, order = router("a", slots=1, history=folder), []
        await made.read_history()

        async def client(length):
            await made.acquire(request(f"{length}", digest(np.asarray(prompts[length])).hex()))
            order.append(length)
            await asyncio.sleep(0.01)
            made.release(f"{length}", length)

        await asyncio.gather(*map(client, prompts))
        return order

    assert run(play(str(tmp_path / "history")))[3:] == [40, 30, 10], "but for those that found room as they came"
    assert run(play(str(tmp_path / "none"))) == list(prompts), "as they came"


def test_requests_wait_and_one_that_is_given_up_leaves_nothing():
    async def play():
        made = router("a")
        calls = [asyncio.ensure_future(made.acquire(request(str(i)))) for i in range(ROOM + 3)]
        await asyncio.sleep(0.1)
        assert [call.done() for call in calls] == [True] * ROOM + [False] * 3
        made.release(str(ROOM), None)
        await asyncio.sleep(0)
        assert calls[ROOM].cancelled() and made.get_status()["waiting"] == 2
        metrics = made.take_metrics()
        assert (metrics["rollout/routing/waiting_max"], metrics["rollout/routing/admissions"]) == (3, ROOM)
        for name, waiting in (("0", calls[ROOM + 1]), ("1", calls[ROOM + 2])):
            made.release(name, 5)
            await waiting
        metrics = made.take_metrics()
        assert (metrics["rollout/routing/waiting_max"], metrics["rollout/routing/admissions"]) == (1, 2), "since then"

    run(play())


def test_with_the_last_server_all_who_wait_are_told():
    async def play():
        made = router("a", chunk_tokens=16)
        calls = [asyncio.ensure_future(made.acquire(request(str(i)))) for i in range(ROOM + 2)]
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="No available servers in load balancer"):
            await made.fail("0", "a")
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(one) for one in results].count(RuntimeError) == 2

    run(play())


def test_a_cache_that_leaves_slots_empty_is_said_once(capsys):
    def said(slots, chunk):
        run(router("a", "b", slots=slots, chunk_tokens=chunk).acquire(request("r")))
        return capsys.readouterr().out.splitlines()

    (line,) = said(12, None)
    assert "holds 8 of its 12 requests at full length (512 tokens)" in line
    assert said(12, 64) == said(8, None) == []
