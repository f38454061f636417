"""verl's RequestLoadBalancer around sam.routing: requests wait here until a replica has room for them.

verl 0.9.1 loads the class through `rollout.router_config_path` and makes one actor of it for all agent loops.
"""

import asyncio
from pathlib import Path
from typing import Any

import ray
from cachetools import LRUCache
from omegaconf import DictConfig, OmegaConf

from sam.history.lengths import ResponseLengths
from sam.routing.decision_log import LoggedPolicy
from sam.routing.policy import RoutingSettings

LOG_FILE = "routing.jsonl"
ACTOR_CLASS = f"{__name__}.ContextRouterActor"
# The longest wait for more requests, in units of `settle_ms`, while they keep coming.
LONGEST_SETTLING = 25
# Calls that the actor takes at once. Ray's default is 1000: with as many requests waiting, no release would get in.
MAX_CALLS = 1 << 16
CONVERSATIONS = 10_000  # as many as verl's balancer remembers
NO_SERVERS = "No available servers in load balancer"  # verl's words, for which its clients look


def write_config(config: DictConfig) -> None:
    """Write the file that `rollout.router_config_path` names, if the recipe's router is to be used."""
    if config.routing.policy != "context":
        return
    path = Path(config.actor_rollout_ref.rollout.router_config_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    drafts = config.speculation.num_speculative_tokens if config.speculation.method != "off" else 0
    routing = OmegaConf.to_container(config.routing, resolve=True)
    settings = {**routing, "lookahead_tokens": drafts, "log": str(Path(config.run_dir) / LOG_FILE)}
    settings["history"] = config.speculation.history_path
    OmegaConf.save(OmegaConf.create({"router_class": ACTOR_CLASS, **settings}), path)


class ContextRouter:
    """Holds requests and hands out servers as sam.routing.policy.ContextPolicy decides.

    Args:
        servers: server id -> actor handle of recipe.rollout.server.SpeculationServer.
        config: the file's content: chunk_tokens, max_wait, lookahead_tokens, ahead, settle_ms, log, and history,
            the folder of the history of responses where there is one.
    """

    def __init__(self, servers: dict[str, Any], config: dict[str, Any]):
        settings = RoutingSettings(
            *(config[name] for name in ("chunk_tokens", "max_wait", "lookahead_tokens", "ahead"))
        )
        self._log = LoggedPolicy(settings, Path(config["log"]))
        self._lengths = ResponseLengths(Path(folder)) if (folder := config.get("history")) else None
        self._settle_seconds = config["settle_ms"] / 1e3
        self._servers = dict(servers)
        self._unmeasured = dict(servers)  # those whose limits are not known yet
        self._measuring = asyncio.Lock()
        self._waiting: dict[str, asyncio.Future] = {}
        # The policy's name of a request is its number: short in the log, and equal when a run repeats.
        self._names: dict[str, str] = {}
        self._requests_seen = 0
        self._conversation_of: dict[str, str] = {}
        self._last_server = LRUCache(maxsize=CONVERSATIONS)  # of each conversation
        self._settling: asyncio.TimerHandle | None = None
        self._settling_since = 0.0

    def require_acquire_fields(self) -> list[str]:
        """verl's own client sends the prompt, by which the group is known; recipe.rollout.client sends what follows."""
        return ["prompt_ids", "sampling_params"]

    def require_release_fields(self) -> list[str]:
        return ["request_id"]

    async def acquire_server(
        self,
        request_id: str,
        prompt_ids: list[int] | None = None,
        sampling_params: dict[str, Any] | None = None,
        *,
        group: str | None = None,
        prompt_tokens: int | None = None,
        limit: int | None = None,
        expected: int | None = None,
        conversation: str | None = None,
        emitted: int | None = None,
        failed_server: str | None = None,
        tell_waiting: bool = False,
    ) -> tuple[str, Any] | tuple[str, Any, int]:
        """Wait until a request may start, or go on; returns the server's id and handle.

        Args:
            prompt_ids, sampling_params: of verl's own client, instead of group, prompt_tokens and limit.
            expected: tokens that responses of its group will have, where they are known beforehand.
            conversation: equal for all turns of an agent loop, which `request_id` is with verl's own client; the next
                turn goes before new requests, and back to its replica if there is room.
            emitted: tokens of the request's last chunk; None: it is new.
            failed_server: the server at which that chunk failed.
            tell_waiting: whether to return, besides, how many requests are left waiting here.

        Raises:
            RuntimeError: there is no server.
        """
        await self._measure_servers()
        if failed_server is not None:
            self.remove_servers([failed_server])
        if not self._servers:
            raise RuntimeError(NO_SERVERS)
        if emitted is not None:
            name = self._names[request_id]
            self._log.event("proceed", name, emitted)
        else:
            name = self._names[request_id] = str(self._requests_seen)
            self._requests_seen += 1
            if group is None:
                tokens = tuple(prompt_ids or ())
                group, prompt_tokens = f"{hash(tokens) & (2**64 - 1):016x}", len(tokens)
                limit = (sampling_params or {}).get("max_tokens") or self._longest - prompt_tokens
            if expected is None and self._lengths is not None:
                expected = self._lengths.expected(group)
            conversation = self._conversation_of[name] = conversation or request_id
            near = self._last_server.get(conversation)
            self._log.event("arrive", name, group, prompt_tokens, limit, 0, expected, near)
            self._expect_more()
        future = self._waiting[name] = asyncio.get_running_loop().create_future()
        self._start_waiting()
        placed = await future
        return (*placed, self._log.policy.waiting) if tell_waiting else placed

    def release_server(self, server_id: str, request_id: str | None = None, emitted: int | None = None) -> None:
        """A response is complete, its last chunk after `emitted` tokens; None: it failed, was given up while it ran or
        waited, or nobody counted."""
        if (name := self._names.pop(request_id, None)) is None:
            return
        if (future := self._waiting.pop(name, None)) is not None:
            future.cancel()  # or its call would stay, and the actor takes no end of calls
        self._last_server[self._conversation_of.pop(name)] = server_id
        if emitted is None:
            self._log.event("abort", name)
        else:
            self._log.event("finish", name, emitted)
        self._start_waiting()

    async def add_servers(self, servers: dict[str, Any]) -> None:
        """Servers that have come; requests start there once their limits are known."""
        self._servers.update(servers)
        self._unmeasured.update(servers)
        await self._measure_servers()
        self._start_waiting()

    def remove_servers(self, server_ids: list[str]) -> None:
        """Servers that are gone. What ran there goes on elsewhere when its client reports it; with no server left,
        all who wait are told."""
        for server in server_ids:
            if self._servers.pop(server, None) is not None:
                self._unmeasured.pop(server, None)
                self._log.event("remove_replica", server)
        if not self._servers:
            for name, future in self._waiting.items():
                self._log.event("abort", name)
                if not future.done():
                    future.set_exception(RuntimeError(NO_SERVERS))
            self._waiting.clear()

    def get_all_servers(self) -> list[str]:
        return list(self._servers)

    def get_total_inflight(self) -> int:
        return sum(self._log.policy.running().values())

    def get_status(self) -> dict:
        """verl's keys, and the policy's counters."""
        running, policy = self._log.policy.running(), self._log.policy
        return {
            "servers": running,
            "total_inflight": sum(running.values()),
            "active_servers": len(self._servers),
            "registered_handles": list(self._servers),
            "waiting": policy.waiting,
            **policy.counters,
        }

    def take_metrics(self) -> dict[str, float]:
        """Figures of what was routed since the last call, as sam.routing.meter.Meter.take names them."""
        return self._log.take_metrics()

    def clear_sticky_cache(self) -> dict:
        """Forget where conversations ran; a chunk's way back is weighed every time."""
        cleared = len(self._last_server)
        self._last_server.clear()
        return {"cleared_entries": cleared, "server_loads": self._log.policy.running()}

    async def read_history(self) -> None:
        """Learn how long responses of earlier steps were. Requests do not wait for it: those that come before it ends
        have no estimate from there."""
        if self._lengths is not None:
            await asyncio.to_thread(self._lengths.refresh)

    async def _measure_servers(self) -> None:
        """Ask new servers what their engines hold."""
        if not self._unmeasured:
            return
        async with self._measuring:
            asked = dict(self._unmeasured)
            found = await asyncio.gather(*(handle.routing_limits.remote() for handle in asked.values()))
            for server, limits in zip(asked, found, strict=True):
                if self._unmeasured.pop(server, None) is not None:
                    sizes = (limits[name] for name in ("kv_tokens", "slots", "block_tokens"))
                    self._log.event("add_replica", server, *sizes)
                    self._longest = limits["max_model_len"]
            if found and (remark := kv_remark(found[0], self._log.policy.settings.chunk_tokens)):
                print(remark, flush=True)

    def _expect_more(self) -> None:
        """Wait for further requests before siblings of a probe start: requests of a round come one by one."""
        loop = asyncio.get_running_loop()
        if self._settling is None:
            self._settling_since = loop.time()
        elif loop.time() - self._settling_since > LONGEST_SETTLING * self._settle_seconds:
            return
        else:
            self._settling.cancel()
        self._settling = loop.call_later(self._settle_seconds, self._settled)

    def _settled(self) -> None:
        self._settling = None
        self._start_waiting()

    def _start_waiting(self) -> None:
        for name, server, _ in self._log.decide(settled=self._settling is None):
            future = self._waiting.pop(name)
            if not future.done():
                future.set_result((server, self._servers[server]))


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
