"""Shards as Ray actors, and the way to them. The only file of sam that imports Ray, and only where it is used.

An engine process is started by verl's server, which is a Ray actor, but is not one itself: a process beside it joins
the cluster as a driver of its own (sam.sharing.relay). Shards are named actors in a namespace that bears the run's id.
Ray starts one anew, empty, when it dies; clients then send their text again.
"""

import os
import time
from concurrent.futures import Future
from typing import Any, NamedTuple

from sam.sharing.groups import Groups
from sam.sharing.messages import Message, nothing
from sam.sharing.packing import pack, unpack

TTL_SECONDS = 1800.0  # a group that nobody asks for or appends to
GATHER_SECONDS = 30.0  # for all shards to be started


Answer = bytes | str  # a reply, packed, or what was wrong with the message


class Cluster(NamedTuple):
    """Where the shards of a run are: what the recipe hands to each engine as `additional_config["sharing"]`.

    Attributes:
        address: of Ray's head, HOST:PORT.
        run_id: of the run, which shards ask for.
        shards: their number.
    """

    address: str
    run_id: str
    shards: int


class Shard:
    """What runs in the actor: Groups, with a clock."""

    def __init__(self, run_id: str, budget_bytes: int, ttl_seconds: float = TTL_SECONDS):
        self.groups, self.calls = Groups(run_id, budget_bytes, ttl_seconds), 0

    def exchange(self, messages: list[bytes]) -> list[Answer]:
        """As Groups.exchange of each message, at this moment; all packed."""
        self.calls += 1
        return [self._answer(message) for message in messages]

    def _answer(self, message: bytes) -> Answer:
        try:
            return pack(self.groups.exchange(unpack(Message, message), time.monotonic()))
        except Exception as error:  # the other messages are of other engines
            return f"{type(error).__name__}: {error}"

    def state(self) -> dict[str, int]:
        """Groups, tokens and bytes held; groups evicted and expired; calls so far; and the process's number."""

        groups = self.groups
        return {
            "groups": len(groups),
            "tokens": groups.num_tokens,
            "bytes": groups.nbytes,
            "evicted": groups.evicted,
            "expired": groups.expired,
            "calls": self.calls,
            "pid": os.getpid(),
        }


def namespace(run_id: str) -> str:
    """Ray's namespace of a run's shards."""
    return f"sam-sharing-{run_id}"


def start_shards(count: int, run_id: str, budget_bytes: int) -> tuple[Cluster, list[Any]]:
    """Start the shards of a run in the Ray cluster that this process has joined.

    They end with the process that starts them, or when the handles are gone.

    Args:
        count: of shards, 1 or more.
        run_id: any text that no other run in the cluster has.
        budget_bytes: of each shard.

    Returns:
        Where they are, and their handles, which the caller keeps.
    """
    import ray

    actor, options = ray.remote(Shard), dict(num_cpus=0, max_restarts=-1, namespace=namespace(run_id))
    handles = [actor.options(name=name_of(n), **options).remote(run_id, budget_bytes) for n in range(count)]
    ray.get([handle.state.remote() for handle in handles], timeout=GATHER_SECONDS)
    return Cluster(ray.get_runtime_context().gcs_address, run_id, count), handles


def name_of(shard: int) -> str:
    """A shard's name in its namespace."""
    return f"shard-{shard}"


class ShardActors:
    """The shards of a run, as this process's Ray calls them.

    Args:
        cluster: where they are; this process joins it, unless it has.
    """

    def __init__(self, cluster: Cluster):
        import ray

        if not ray.is_initialized():
            ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
        names = [name_of(shard) for shard in range(cluster.shards)]
        self._actors = [ray.get_actor(name, namespace=namespace(cluster.run_id)) for name in names]
        # Nobody waits for the answers. A process's first call of an actor takes Ray a tenth of a second of CPU, which a
        # rollout's first text would wait for.
        greeting = pack(nothing(cluster.run_id))
        self._greetings = [actor.exchange.remote([greeting]) for actor in self._actors]

    def exchange(self, shard: int, messages: list[bytes]) -> Future:
        """As Shard.exchange of that shard."""
        return self._actors[shard].exchange.remote(messages).future()
