"""The router's actor: requests wait here until sam.routing finds a replica that has room for them.

verl 0.9.1 loads the class through `rollout.router_config_path` and makes one actor of it for all agent loops. Its calls
are those of recipe.rollout.client, not of verl's own client.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

import ray
from cachetools import LRUCache
from omegaconf import DictConfig, OmegaConf

from sam.history.lengths import ResponseLengths
from sam.routing.decision_log import DecisionLog
from sam.routing.policy import ContextPolicy, RoutingSettings

LOG_FILE = "routing.jsonl"
ACTOR_CLASS = f"{__name__}.ContextRouterActor"
AHEAD = 2  # requests that wait in an engine, which fills a slot in the step after it became free
# Calls that the actor takes at once. Ray's default is 1000: with as many requests waiting, no release would get in.
MAX_CALLS = 1 << 16
CONVERSATIONS = 10_000  # as many as verl's balancer remembers
NO_SERVERS = "No available servers in load balancer"  # verl's words


class Request(NamedTuple):
    """A response to generate.

    id: no other request has it while this one is here. group: equal for all samples of a prompt. limit: most tokens of
    the response. conversation: equal for all turns of an agent loop; the next turn goes before new requests, and back
    to its replica if there is room.
    """

    id: str
    group: str
    prompt_tokens: int
    limit: int
    conversation: str


class Placement(NamedTuple):
    """Where a chunk runs: the server's id and actor handle; and how many requests are left waiting in the router."""

    server_id: str
    server: Any
    waiting: int


def write_config(config: DictConfig) -> None:
    """Write the file that `rollout.router_config_path` names, if the recipe's router is to be used."""
    if config.routing.policy != "context":
        return
    path = Path(config.actor_rollout_ref.rollout.router_config_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    settings = {
        "router_class": ACTOR_CLASS,
        "chunk_tokens": config.routing.chunk_tokens,
        "lookahead_tokens": config.speculation.num_speculative_tokens if config.speculation.method != "off" else 0,
        "log": str(Path(config.run_dir) / LOG_FILE),
        "history": config.speculation.history_path,
    }
    OmegaConf.save(OmegaConf.create(settings), path)


class ContextRouter:
    """Holds requests and hands out servers as sam.routing.policy.ContextPolicy decides.

    A request is acquired, proceeds after each chunk but the last, or fails with its server, and is released.

    Args:
        servers: server id -> actor handle of recipe.rollout.server.SpeculationServer.
        config: the file's content: chunk_tokens, lookahead_tokens, log, and history, the folder of the history of
            responses where there is one.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]):
        settings = RoutingSettings(config["chunk_tokens"], config["lookahead_tokens"], AHEAD)
        self._policy = ContextPolicy(settings)
        self._log = DecisionLog(self._policy, Path(config["log"]))
        self._lengths = ResponseLengths(Path(folder)) if (folder := config.get("history")) else None
        self._servers = dict(servers)
        self._measuring, self._measured = asyncio.Lock(), False
        # By the policy's name of a request, its number: short in the log, and equal when a run repeats.
        self._waiting: dict[str, asyncio.Future[Placement]] = {}
        self._active: dict[str, tuple[str, str]] = {}  # by id: that name, conversation
        self._requests_seen = 0
        self._last_server = LRUCache(maxsize=CONVERSATIONS)  # of each conversation

    async def acquire(self, request: Request) -> Placement:
        """Wait until a request may start.

        Raises:
            RuntimeError: there is no server.
        """
        await self._measure_servers()
        name = str(self._requests_seen)
        self._requests_seen += 1
        self._active[request.id] = name, request.conversation
        expected = self._lengths.expected(request.group) if self._lengths is not None else None
        near = self._last_server.get(request.conversation)
        self._policy.arrive(name, request.group, request.prompt_tokens, request.limit, expected, near)
        return await self._place(request.id)

    async def proceed(self, id: str, tokens: int) -> Placement:
        """Wait until a request may go on, whose chunk has ended after `tokens` tokens; raises as `acquire`."""
        self._policy.proceed(self._active[id][0], tokens)
        return await self._place(id)

    async def fail(self, id: str, server: str) -> Placement:
        """Drop a server that has died under a request's chunk, and wait until that may begin again elsewhere; raises as
        `acquire`."""
        if self._servers.pop(server, None) is not None:
            self._policy.remove_replica(server)
        if not self._servers:  # who waits is told
            for name, future in self._waiting.items():
                self._policy.abort(name)
                if not future.done():
                    future.set_exception(RuntimeError(NO_SERVERS))
            self._waiting.clear()
        return await self.proceed(id, 0)

    def release(self, id: str, tokens: int | None) -> None:
        """A response is complete, its last chunk after `tokens` tokens; None: it failed, or was given up while it ran
        or waited."""
        if (found := self._active.pop(id, None)) is None:
            return
        name, _ = found
        if (future := self._waiting.pop(name, None)) is not None:
            future.cancel()  # or its call would stay, and the actor takes no end of calls
        if tokens is None:
            self._policy.abort(name)
        else:
            self._policy.finish(name, tokens)
        self._start_waiting()

    def get_status(self) -> dict[str, Any]:
        """Requests that run at each server, that wait, and the policy's counters."""
        return {"servers": self._policy.running(), "waiting": self._policy.waiting, **self._policy.counters}

    def take_metrics(self) -> dict[str, float]:
        """Figures of what was routed since the last call, as sam.routing.meter.Meter.take names them."""
        return self._log.meter.take(time.time())

    async def read_history(self) -> None:
        """Learn how long responses of earlier steps were. Requests do not wait for it: those that come before it ends
        have no estimate from there."""
        if self._lengths is not None:
            await asyncio.to_thread(self._lengths.refresh)

    async def _place(self, id: str) -> Placement:
        if not self._servers:
            raise RuntimeError(NO_SERVERS)
        name, conversation = self._active[id]
        self._waiting[name] = future = asyncio.get_running_loop().create_future()
        self._start_waiting()
        placement = await future
        self._last_server[conversation] = placement.server_id
        return placement._replace(waiting=self._policy.waiting)

    def _start_waiting(self) -> None:
        for name, server, _ in self._policy.decide():
            future = self._waiting.pop(name)
            if not future.done():
                future.set_result(Placement(server, self._servers[server], 0))

    async def _measure_servers(self) -> None:
        """Ask the servers once what their engines hold."""
        async with self._measuring:
            if self._measured:
                return
            found = await asyncio.gather(*(handle.routing_limits.remote() for handle in self._servers.values()))
            for server, limits in zip(self._servers, found, strict=True):
                self._policy.add_replica(server, limits["kv_tokens"], limits["slots"], limits["block_tokens"])
            if found and (remark := kv_remark(found[0], self._policy.settings.chunk_tokens)):
                print(remark, flush=True)
            self._measured = True


def kv_remark(limits: dict[str, int], chunk_tokens: int | None) -> str | None:
    """What to say of a replica that is given fewer requests than it has slots, as each one's longest response must fit.

    Args:
        limits: as recipe.rollout.server.SpeculationServer.routing_limits.
        chunk_tokens: None: responses are generated whole.
    """
    fit = limits["kv_tokens"] // limits["max_model_len"]
    if chunk_tokens is not None or fit >= limits["slots"]:
        return None
    return (
        f"routing=context: a replica's KV cache of {limits['kv_tokens']} tokens holds {fit} of its {limits['slots']} "
        f"requests at full length ({limits['max_model_len']} tokens), and no more are started: set "
        "routing.chunk_tokens, for example to an eighth of data.max_response_length"
    )


ContextRouterActor = ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)(ContextRouter)
