"""The router's actor: requests wait here until sam.routing finds a replica that has room for them.

verl 0.9.1 loads the class through `rollout.router_config_path` and makes one actor of it for all agent loops. Its calls
are those of recipe.sam_dapo.rollout.agent_loop, not of verl's own client.
"""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import ray
from cachetools import LRUCache
from omegaconf import DictConfig, OmegaConf

from recipe.sam_dapo.launch import routing
from sam.history.database import ResponseLengths
from sam.record import replacing
from sam.routing import ContextPolicy, RoutingSettings

ACTOR_CLASS = f"{__name__}.ContextRouterActor"
AHEAD = 2  # requests that wait in an engine, which fills a slot in the step after it became free
# Calls that the actor takes at once. Ray's default is 1000: with as many requests waiting, no release would get in.
MAX_CALLS = 1 << 16
CONVERSATIONS = 10_000  # as many as verl's balancer remembers
NO_SERVERS = "No available servers in load balancer"  # verl's words


class RoutedRequest(NamedTuple):
    """A response to generate."""

    id: str  # no other request has it while this one is here
    group: str  # equal for all samples of a prompt
    prompt_tokens: int
    limit: int  # most tokens of the response
    conversation: str  # of all turns of an agent loop: the next one goes before new requests, and back to its replica


class Placement(NamedTuple):
    """Where a chunk runs: the server's id and actor handle."""

    server_id: str
    server: Any


def write_config(config: DictConfig) -> None:
    """Write the file that `rollout.router_config_path` names, for a run with routing=context."""
    path = Path(config.actor_rollout_ref.rollout.router_config_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    speculation = config.speculation
    settings = {
        "router_class": ACTOR_CLASS,
        "chunk_tokens": config.routing.chunk_tokens,
        "lookahead_tokens": 0 if speculation.method == "off" else speculation.num_speculative_tokens,
        "history": speculation.history_path,
    }
    with replacing(path) as partial:
        OmegaConf.save(OmegaConf.create(settings), partial)


def take_metrics(trainer) -> dict[str, float]:
    """What the router of a trainer of verl's did since the last call; nothing without one."""
    if not routing.is_routed(trainer.config):
        return {}
    return ray.get(trainer.llm_server_manager.global_load_balancer.take_metrics.remote())


def read_history(trainer) -> None:
    """Let the router of a trainer of verl's learn how long responses of earlier steps were, while it goes on."""
    if routing.is_routed(trainer.config):
        trainer.llm_server_manager.global_load_balancer.read_history.remote()


class ContextRouter:
    """Holds requests and hands out servers as sam.routing.ContextPolicy decides.

    A request is acquired, proceeds after each chunk but the last, or fails with its server, and is released.

    Args:
        servers: server id -> actor handle of recipe.sam_dapo.rollout.server.SpeculationServer.
        config: as `write_config` writes it.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]):
        self._policy = ContextPolicy(RoutingSettings(config["chunk_tokens"], config["lookahead_tokens"], AHEAD))
        self._taken = dict(self._policy.counters)  # at the last call of take_metrics
        self._most_waiting = 0  # since then
        history = config.get("history")
        self._lengths = ResponseLengths(Path(history)) if history else None
        self._servers = dict(servers)
        self._measuring = asyncio.Lock()
        self._measured = False
        self._waiting: dict[str, asyncio.Future[Placement]] = {}  # by request
        self._conversations: dict[str, str] = {}  # of the requests that are here
        self._last_server = LRUCache(maxsize=CONVERSATIONS)  # of each conversation

    async def acquire(self, request: RoutedRequest) -> Placement:
        """Wait until a request may start; RuntimeError if there is no server."""
        await self._measure_servers()
        self._conversations[request.id] = request.conversation
        expected = self._lengths.expected(request.group) if self._lengths is not None else None
        near = self._last_server.get(request.conversation)
        self._policy.arrive(request.id, request.group, request.prompt_tokens, request.limit, expected, near)
        return await self._place(request.id)

    async def proceed(self, id: str, tokens: int) -> Placement:
        """Wait until a request may go on, whose chunk has ended after `tokens` tokens."""
        self._policy.proceed(id, tokens)
        return await self._place(id)

    async def fail(self, id: str, server: str) -> Placement:
        """Drop a server that has died under a request's chunk, and wait until that may begin again elsewhere."""
        if self._servers.pop(server, None) is not None:
            self._policy.remove_replica(server)
        if not self._servers:  # who waits is told
            for waiting, future in self._waiting.items():
                self._policy.abort(waiting)
                if not future.done():
                    future.set_exception(RuntimeError(NO_SERVERS))
            self._waiting.clear()
        return await self.proceed(id, 0)

    def release(self, id: str, tokens: int | None) -> None:
        """Let a complete response go, its last chunk after `tokens` tokens; None: it failed or was given up."""
        self._conversations.pop(id, None)
        future = self._waiting.pop(id, None)
        if future is not None:
            future.cancel()  # or its call would stay, and the actor takes no end of calls
        if tokens is None:
            self._policy.abort(id)
        else:
            self._policy.finish(id, tokens)
        self._start_waiting()

    def get_status(self) -> dict[str, Any]:
        """Requests that run at each server, that wait, and the policy's counters."""
        return {"servers": self._policy.running(), "waiting": self._policy.waiting, **self._policy.counters}

    def take_metrics(self) -> dict[str, float]:
        """Metrics since the last call: ContextPolicy.counters, and waiting_max, most requests that waited."""
        counters = dict(self._policy.counters)
        values = {name: count - self._taken[name] for name, count in counters.items()}
        values["waiting_max"] = max(self._most_waiting, self._policy.waiting)
        self._taken = counters
        self._most_waiting = 0
        return {f"rollout/routing/{name}": float(value) for name, value in values.items()}

    async def read_history(self) -> None:
        """Learn how long responses of earlier steps were. Requests do not wait for it: those that come before it ends
        have no estimate from there."""
        if self._lengths is not None:
            await asyncio.to_thread(self._lengths.refresh)

    async def _place(self, id: str) -> Placement:
        if not self._servers:
            raise RuntimeError(NO_SERVERS)
        future = asyncio.get_running_loop().create_future()
        self._waiting[id] = future
        self._start_waiting()
        placement = await future
        self._last_server[self._conversations[id]] = placement.server_id
        return placement

    def _start_waiting(self) -> None:
        for id, server, _ in self._policy.decide():
            future = self._waiting.pop(id)
            if not future.done():
                future.set_result(Placement(server, self._servers[server]))
        self._most_waiting = max(self._most_waiting, self._policy.waiting)

    async def _measure_servers(self) -> None:
        """Ask the servers once what their engines hold; say where an engine is given fewer requests than it has slots,
        as the longest response of each must fit."""
        async with self._measuring:
            if self._measured:
                return
            replicas = await asyncio.gather(*(handle.routing_limits.remote() for handle in self._servers.values()))
            for server, limits in zip(self._servers, replicas, strict=True):
                self._policy.add_replica(server, limits["kv_tokens"], limits["slots"], limits["block_tokens"])
            if replicas and self._policy.settings.chunk_tokens is None:
                remark = kv_remark(**replicas[0])
                if remark:
                    print(remark, flush=True)
            self._measured = True


def kv_remark(kv_tokens: int, slots: int, max_model_len: int, **_) -> str | None:
    """What to say of a replica, by its `routing_limits`, whose KV cache does not hold whole responses in all slots."""
    fit = kv_tokens // max_model_len
    if fit >= slots:
        return None
    return (
        f"routing=context: a replica's KV cache of {kv_tokens} tokens holds {fit} of its {slots} requests at full "
        f"length ({max_model_len} tokens), and no more are started: set routing.chunk_tokens, for example to an eighth "
        "of data.max_response_length"
    )


ContextRouterActor = ray.remote(num_cpus=0, max_concurrency=MAX_CALLS)(ContextRouter)
