"""Routing: which request goes on at which replica, and the samples that its drafter sees there."""

from typing import Protocol

import numpy as np

from sam.routing.policy import ContextPolicy, RoutingSettings
from sam.simulate.lengths import Round

ROUTINGS = ("least-loaded", "prompt", "shared")
ROUTERS = ("verl", "context")
NO_BOUND = 1 << 60


class Router(Protocol):
    """What a simulated rollout asks of a router.

    Attributes:
        next_arrival: milliseconds at which the next request arrives; infinite after the last.
        moves: chunks that went on at another replica so far.
    """

    next_arrival: float
    moves: int

    def arrive(self, now: float) -> None:
        """Requests that arrive up to `now`, in milliseconds, are there."""

    def end(self, request: int, replica: int, generated: int) -> None:
        """A request has reached its target, with `generated` tokens."""

    def decide(self, generated: np.ndarray) -> list[tuple[int, int, int, bool]]:
        """What starts now: request, replica, tokens at which it ends or comes back, and whether the replica has the KV
        cache of its context. `generated`: int64 [requests]."""


class _Arriving:
    """Requests in the order in which they arrive."""

    def __init__(self, work: Round):
        self._work, self._arrived = work, 0
        self._order = np.argsort(work.arrivals, kind="stable")
        self.moves = 0

    @property
    def next_arrival(self) -> float:
        return float(self._work.arrivals[self._order[self._arrived]]) if self._arrived < len(self._work) else np.inf

    def _take(self, now: float) -> list[int]:
        first = self._arrived
        while self.next_arrival <= now:
            self._arrived += 1
        return self._order[first : self._arrived].tolist()


class Assigned(_Arriving):
    """Every request goes to its replica at once and waits there, as with verl's balancer; see :func:`assign`."""

    def __init__(self, work: Round, replica_of: np.ndarray):
        super().__init__(work)
        self._replica_of, self._new = replica_of, []

    def arrive(self, now):
        self._new += self._take(now)

    def end(self, request, replica, generated):
        """It is complete."""

    def decide(self, generated):
        new, self._new = self._new, []
        return [(i, int(self._replica_of[i]), int(self._work.lengths[i]), False) for i in new]


class Routed(_Arriving):
    """The recipe's policy.

    Args:
        chunk: tokens of a chunk; 0: whole responses.
    """

    def __init__(self, work: Round, replicas: int, slots: int, kv_tokens: int, chunk: int):
        super().__init__(work)
        self._policy, self._limit = ContextPolicy(RoutingSettings(chunk or None)), int(work.lengths.max())
        for replica in range(replicas):
            self._policy.add_replica(str(replica), kv_tokens or NO_BOUND, slots, block_tokens=1)  # as Replica counts
        self._known = np.zeros(len(work), dtype=np.int64)  # tokens that the policy knows each to have
        self._last = np.full(len(work), -1)  # replica at which each ran last

    def arrive(self, now):
        for i in self._take(now):
            tokens = int(self._work.prompt_tokens[i])
            self._policy.arrive(str(i), str(self._work.prompts[i]), tokens, self._limit)

    def end(self, request, replica, generated):
        emitted, self._known[request] = generated - int(self._known[request]), generated
        tell = self._policy.finish if generated >= self._work.lengths[request] else self._policy.proceed
        tell(str(request), emitted)

    def decide(self, generated):
        starts = []
        for name, replica, tokens in self._policy.decide():
            i, at = int(name), int(replica)
            cached, began = self._last[i] == at, self._last[i] >= 0
            self.moves += bool(began and not cached)
            self._last[i] = at
            target = min(int(generated[i]) + tokens, int(self._work.lengths[i]))
            starts.append((i, at, target, bool(cached)))
        return starts


def assign(prompts: np.ndarray, replicas: int, routing: str, seed: int = 0) -> np.ndarray:
    """Route the requests of a round, which arrive together.

    least-loaded: the replica with the fewest requests, a random one of them if there are several, as verl 0.9.1's
        GlobalRequestLoadBalancer does it.
    prompt: all samples of a prompt on one replica, the one with the fewest requests when the first sample comes.
    shared: as least-loaded; what is shared is drafting context (`siblings`).

    Args:
        prompts: int64 [requests], number of each one's prompt.

    Returns:
        int64 [requests].
    """
    rng = np.random.default_rng(seed)
    load = np.zeros(replicas, dtype=np.int64)
    home: dict[int, int] = {}
    replica_of = np.empty(len(prompts), dtype=np.int64)
    for i, prompt in enumerate(prompts.tolist()):
        if routing != "prompt" or prompt not in home:
            home[prompt] = int(rng.choice(np.flatnonzero(load == load.min())))
        replica_of[i] = home[prompt]
        load[home[prompt]] += 1
    return replica_of


def siblings(prompts: np.ndarray, replica_of: np.ndarray, routing: str, scope: str) -> np.ndarray:
    """Count the samples of its prompt, itself included, that each request's drafter sees.

    Returns:
        int64 [requests].
    """
    if scope == "request":
        return np.ones(len(prompts), dtype=np.int64)
    places = prompts if routing == "shared" else prompts * (int(replica_of.max(initial=0)) + 1) + replica_of
    _, place, count = np.unique(places, return_inverse=True, return_counts=True)
    return count[place]
