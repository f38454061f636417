"""verl's load balancer around the routing policy, with servers that are asked for their limits only."""

import asyncio
import json
import shutil
import tempfile
from types import SimpleNamespace

import pytest

from recipe.rollout.client import group_of
from recipe.rollout.router import ContextRouter, write_config
from sam.drafting.drafter import Drafter
from sam.history.client import HistoryClient
from sam.routing.decision_log import replay

LIMITS = {"kv_tokens": 4096, "block_tokens": 16, "slots": 2, "max_model_len": 512}


def server(**changed):
    async def limits():
        return LIMITS | changed

    return SimpleNamespace(routing_limits=SimpleNamespace(remote=limits))


def router(tmp_path, servers=("a",), **config) -> ContextRouter:
    settings = {"chunk_tokens": None, "max_wait": 1000, "lookahead_tokens": 0, "ahead": 0, "settle_ms": 1}
    return ContextRouter({name: server() for name in servers}, settings | config | {"log": tmp_path / "routing.jsonl"})


async def play(made: ContextRouter, groups: int, samples: int, chunk: int | None, lengths) -> list[str]:
    """Clients that generate at once as the router lets them; returns requests in the order in which they started."""
    order = []

    async def client(group: int, sample: int) -> None:
        name, generated, emitted = f"{group}.{sample}", 0, None
        length = lengths(group, sample)
        told = {"group": str(group), "prompt_tokens": 8, "limit": 256}
        while generated < length:
            server_id, _ = await made.acquire_server(name, **(told if emitted is None else {"emitted": emitted}))
            order.append(name)
            await asyncio.sleep(0.001)
            emitted = min(chunk or length, length - generated)
            generated += emitted
        made.release_server(server_id, name, emitted)

    async with asyncio.timeout(20):
        await asyncio.gather(*(client(g, s) for g in range(groups) for s in range(samples)))
    return order


@pytest.mark.parametrize("chunk", [None, 16])
def test_every_request_ends_and_the_log_replays(tmp_path, chunk):
    # Longer than the requests take to come on a busy machine.
    made = router(tmp_path, servers=("a", "b"), chunk_tokens=chunk, settle_ms=500)
    order = asyncio.run(play(made, 6, 5, chunk, lambda group, sample: 10 + 20 * group + sample))
    assert set(order) == {f"{g}.{s}" for g in range(6) for s in range(5)}
    assert len({name.split(".")[0] for name in order[:4]}) == 4, "probes first, though siblings came before them"
    status = made.get_status()
    assert status["waiting"] == status["total_inflight"] == 0 and status["admissions"] == len(order)
    lines = (tmp_path / "routing.jsonl").read_text().splitlines()
    assert replay(lines) == len(order)
    start = next(i for i, line in enumerate(lines) if json.loads(line)[1] == "arrive")
    swapped = [*lines[:start], *lines[start + 1 :]]
    with pytest.raises((ValueError, KeyError)):
        replay(swapped)


def test_requests_of_verls_own_client_are_grouped_by_their_prompts(tmp_path):
    async def run():
        made = router(tmp_path)
        for i, prompt in enumerate(([1, 2, 3], [1, 2, 3], [4, 5])):
            await made.acquire_server(f"r{i}", prompt_ids=prompt, sampling_params={"max_tokens": 9})
            made.release_server("a", f"r{i}")

    asyncio.run(run())
    lines = [json.loads(line) for line in (tmp_path / "routing.jsonl").read_text().splitlines()]
    groups = [line[3:6] for line in lines if line[1] == "arrive"]
    assert groups[0] == groups[1] != groups[2]
    assert groups[0][1:] == [3, 9]
    assert [line[1] for line in lines].count("abort") == 3, "a length that nobody counted says nothing"


def test_longer_expected_groups_go_first_where_lengths_are_known_beforehand(tmp_path):
    async def run():
        made, order = router(tmp_path), []

        async def client(name, expected):
            told = {"group": name, "prompt_tokens": 8, "limit": 64, "expected": expected}
            server_id, _ = await made.acquire_server(name, **told)
            order.append(name)
            await asyncio.sleep(0.01)
            made.release_server(server_id, name, expected)

        await asyncio.gather(*(client(f"{expected}", expected) for expected in (5, 50, 20, 40)))
        assert set(order[:2]) == {"50", "40"} and order[2] == "20"
        metrics = made.take_metrics()
        assert metrics["admissions"] == 4 and metrics["waiting_max"] >= 2

    asyncio.run(run())


def test_lengths_in_the_history_are_the_estimate_before_the_probe(tmp_path):
    """With the file that engines write, and the names that the client gives groups."""
    prompts = {length: [7, length] for length in (5, 50, 20, 40)}
    history = HistoryClient(tmp_path / "history", {"tokenizer": "1f", "model": "qwen3"}, 1 << 40, 9)
    history.start()
    for length, prompt in prompts.items():
        history.request_started(f"{length}", prompt, Drafter(max_draft_tokens=3))
        history.request_finished(f"{length}", list(range(length)))
    history.stop()

    async def run(folder, **config):
        made, order = router(folder, settle_ms=100, **config), []
        await made.read_history()

        async def client(length):
            told = {"group": group_of(prompts[length]), "prompt_tokens": 2, "limit": 64}
            server_id, _ = await made.acquire_server(f"{length}", **told)
            order.append(length)
            await asyncio.sleep(0.01)
            made.release_server(server_id, f"{length}", length)

        async with asyncio.timeout(20):
            await asyncio.gather(*map(client, prompts))
        return order, made.take_metrics()

    order, metrics = asyncio.run(run(tmp_path / "with", history=str(tmp_path / "history")))
    assert set(order[:2]) == {50, 40} and order[2] == 20
    assert (metrics["estimates_history"], metrics["estimate_error_history"]) == (4, 0)
    lines = (tmp_path / "with" / "routing.jsonl").read_text().splitlines()
    assert replay(lines) == 4, "the log has what was expected"
    for without in ({}, {"history": None}, {"history": str(tmp_path / "none")}):
        order, metrics = asyncio.run(run(tmp_path / "without", **without))
        assert order == list(prompts) and metrics["estimates_history"] == 0, "as they came"


def test_the_next_turn_of_a_conversation_goes_back_to_its_replica(tmp_path):
    async def run():
        made = router(tmp_path, servers=("a", "b", "c"))
        first, _ = await made.acquire_server("1", group="g", prompt_tokens=8, limit=64, conversation="talk")
        other, _ = await made.acquire_server("2", group="h", prompt_tokens=8, limit=64, conversation="more")
        made.release_server(other, "2", 5)
        third, _ = await made.acquire_server("3", group="i", prompt_tokens=80, limit=64, conversation="more")
        assert third == other != first
        made.release_server(first, "1", 5)
        assert made.clear_sticky_cache()["cleared_entries"] == 2

    asyncio.run(run())


def test_a_next_turn_goes_before_new_requests(tmp_path):
    async def run():
        made, order = router(tmp_path, servers=("a",), settle_ms=200), []

        async def turn(name, conversation, prompt_tokens):
            told = {"group": name, "prompt_tokens": prompt_tokens, "limit": 64, "conversation": conversation}
            server_id, _ = await made.acquire_server(name, **told)
            order.append(name)
            await asyncio.sleep(0.02)
            made.release_server(server_id, name, 5)

        async def talk(conversation):
            for number in range(3):
                await turn(f"{conversation}.{number}", conversation, 8 + 16 * number)
                await asyncio.sleep(0.005)  # a tool's answer

        async with asyncio.timeout(20):
            await asyncio.gather(*(talk(f"{i}") for i in range(6)))
        return order

    order = asyncio.run(run())
    places = {name: place for place, name in enumerate(order)}
    assert set(order[:2]) == {"0.0", "1.0"}
    for turns in ("1", "2"):
        assert places[f"0.{turns}"] < places["5.0"] and places[f"1.{turns}"] < places["5.0"], order
    assert replay((tmp_path / "routing.jsonl").read_text().splitlines()) == 18


def test_a_request_that_is_given_up_while_it_waits_leaves_nothing(tmp_path):
    async def run():
        made = router(tmp_path)
        told = {"group": "g", "prompt_tokens": 8, "limit": 64}
        calls = [asyncio.ensure_future(made.acquire_server(str(i), **told)) for i in range(3)]
        await asyncio.sleep(0.1)
        assert [call.done() for call in calls] == [True, True, False] and made.get_status()["waiting"] == 1
        made.release_server("", "2")
        await asyncio.sleep(0)
        assert calls[2].cancelled() and made.get_status()["waiting"] == 0 and not made._waiting
        made.release_server("a", "0", 5)
        assert made.get_total_inflight() == 1, "its place is not given to the one that is gone"

    asyncio.run(run())


def test_who_asks_is_told_how_many_are_left_waiting(tmp_path):
    async def run():
        made, told = router(tmp_path), {"group": "g", "prompt_tokens": 8, "limit": 64}
        calls = [asyncio.ensure_future(made.acquire_server(str(i), tell_waiting=True, **told)) for i in range(5)]
        await asyncio.sleep(0.1)
        assert [len(call.result()) for call in calls[:2]] == [3, 3]
        for i in range(3):
            made.release_server("a", str(i), 5)
            _, _, waiting = await calls[2 + i]
            assert waiting == 2 - i

    asyncio.run(run())


def test_a_failed_server_is_dropped_and_its_chunk_goes_on_elsewhere(tmp_path):
    async def run():
        made = router(tmp_path, servers=("a", "b"), chunk_tokens=16)
        first, _ = await made.acquire_server("r", group="g", prompt_tokens=8, limit=64)
        second, _ = await made.acquire_server("r", emitted=0, failed_server=first)
        assert first != second and made.get_all_servers() == [second]
        with pytest.raises(RuntimeError, match="No available servers in load balancer"):
            await made.acquire_server("r", emitted=0, failed_server=second)

    asyncio.run(run())


def test_who_waits_is_told_when_the_last_server_goes(tmp_path):
    async def run():
        made = router(tmp_path)
        waiting = [
            asyncio.ensure_future(made.acquire_server(str(i), group="g", prompt_tokens=8, limit=64)) for i in range(5)
        ]
        await asyncio.sleep(0.1)
        assert sum(one.done() for one in waiting) == LIMITS["slots"]
        made.remove_servers(["a"])
        results = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(one) for one in results].count(RuntimeError) == 3

    asyncio.run(run())


def test_a_server_that_comes_takes_who_waits(tmp_path):
    async def run():
        made = router(tmp_path)
        waiting = [
            asyncio.ensure_future(made.acquire_server(str(i), group="g", prompt_tokens=8, limit=64)) for i in range(4)
        ]
        await asyncio.sleep(0.1)
        await made.add_servers({"b": server()})
        async with asyncio.timeout(5):
            assert sorted(name for name, _ in await asyncio.gather(*waiting)) == ["a", "a", "b", "b"]

    asyncio.run(run())


def composed(tmp_path):
    from recipe.launch.config import compose_config

    return compose_config("dapo_tiny_cpu", ["routing=context", f"run_dir={tmp_path}"])


@pytest.mark.e2e
def test_more_than_rays_thousand_calls_may_wait(tmp_path, monkeypatch):
    """With an actor's default of 1000 calls at once, requests that wait keep releases from coming in."""
    import ray

    @ray.remote(num_cpus=0)
    class Server:
        def routing_limits(self):
            return LIMITS

    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets lie below
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # or Ray leaves a token in HOME
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)
    try:
        handle = Server.remote()
        write_config(composed(tmp_path))
        from verl.workers.rollout.router import get_router_handle

        made = get_router_handle({"a": handle}, str(tmp_path / "router.yaml"))
        names = [str(i) for i in range(1500)]
        calls = {made.acquire_server.remote(name, group=name, prompt_tokens=8, limit=64): name for name in names}
        while calls:
            (done, *_), _ = ray.wait(list(calls), timeout=30)
            made.release_server.remote(ray.get(done)[0], calls.pop(done), 5)
        assert ray.get(made.get_status.remote())["admissions"] == len(names)
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)
