"""The context-aware routing policy: probe first, longest first, no more than the KV cache holds.

After Seer (arXiv 2511.14617): one request of each group runs ahead as a probe; the lengths of a group's finished
responses say what is expected of the others; groups of which more is expected start earlier, so that no long response
is left for the end. The policy knows no clock, no Ray and no engine: it is told events and says which waiting request
starts at which replica. Equal events give equal decisions, so that a log of events replays.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from sam.routing.waiting import Replica, Request, Waiting

MOVE_AT = 2  # times the running requests of the least loaded replica from which a chunk moves there
MOVE_LEAST = 4  # and running requests more than there
MOVE_TOKENS = 4  # tokens of context read again for each token expected, up to which a move pays
LASTS = 2  # a response is expected to go on by 1/2 of its length at least (log-normal, sigma 0.8, at thrice its median)
NEAR = 16  # a sibling's replica is taken while it is at most 1/16 of its slots fuller than the least loaded


class Start(NamedTuple):
    """A decision: `request` starts a chunk of up to `tokens` tokens at `replica`."""

    request: str
    replica: str
    tokens: int


@dataclass(frozen=True)
class RoutingSettings:
    """What a policy is made for.

    Attributes:
        chunk_tokens: tokens of a response that are generated before it is routed anew; None: all of them.
        lookahead_tokens: tokens beyond its text that an engine reserves KV cache for, as drafts.
        ahead: requests that a replica is given beyond its slots, once no replica has a free one: they wait in the
            engine, which then fills a slot in the step after it became free, instead of a message's way later.

    Raises:
        ValueError: chunk_tokens is out of range; names the key and what is expected.
    """

    chunk_tokens: int | None = None
    lookahead_tokens: int = 0
    ahead: int = 0

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"routing.chunk_tokens={chunk}: expected an integer of at least 1, or null for no chunks")


class ContextPolicy:
    """Holds the requests of a rollout and starts them where and when there is room.

    Events are methods; :meth:`decide` returns what starts as their consequence. A request is in one of three states:
    it waits, it runs a chunk at a replica, or it is gone (:meth:`finish`, :meth:`abort`).

    Attributes:
        counters: admissions; moves and their prefill_tokens; held_by_kv, decisions that waited for KV cache; estimates,
            responses that ended with one, and estimate_error, the sum of their differences from it in tokens.
        note: called with the name and the arguments of every event before it counts, and with "decide", the number of
            requests left waiting and the starts after a decision that starts something.
    """

    def __init__(self, settings: RoutingSettings):
        self.settings = settings
        names = ("admissions", "moves", "prefill_tokens", "held_by_kv", "estimates", "estimate_error")
        self.counters = dict.fromkeys(names, 0)
        self.note: Callable[..., None] = lambda *_: None
        self._replicas: dict[str, Replica] = {}
        self._requests: dict[str, Request] = {}
        self._waiting = Waiting(shows_progress=settings.chunk_tokens is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def running(self) -> dict[str, int]:
        """Requests that run at each replica."""
        return {name: len(replica.running) for name, replica in self._replicas.items()}

    def slots(self) -> tuple[int, int]:
        """Slots in which requests run, and all slots."""
        busy = sum(min(len(replica.running), replica.slots) for replica in self._replicas.values())
        return busy, sum(replica.slots for replica in self._replicas.values())

    def add_replica(self, name: str, kv_tokens: int, slots: int, block_tokens: int = 16) -> None:
        """A replica has come, or has come again.

        Raises:
            ValueError: no room for a token or a request.
        """
        if kv_tokens < 1 or slots < 1:
            raise ValueError(f"replica {name}: {kv_tokens} tokens of KV cache, {slots} slots: expected 1 or more")
        self.remove_replica(name)
        self.note("add_replica", name, kv_tokens, slots, block_tokens)
        self._replicas[name] = Replica(name, kv_tokens, slots, block_tokens, self.settings.ahead)

    def remove_replica(self, name: str) -> list[str]:
        """A replica is gone; returns the requests that ran there, which go on with :meth:`proceed`."""
        if name not in self._replicas:
            return []
        self.note("remove_replica", name)
        replica = self._replicas.pop(name)
        replica.alive, lost = False, sorted(replica.running)
        for request in lost:
            self._requests[request].replica = None
        return lost

    def arrive(
        self,
        name: str,
        group: str,
        prompt_tokens: int,
        limit: int,
        expected: int | None = None,
        near: str | None = None,
    ) -> None:
        """A request has come.

        Args:
            group: name of its prompt.
            limit: most tokens of its response.
            expected: tokens that its group's responses are thought to have beforehand, as of an earlier epoch.
            near: the replica that has the KV cache of its prompt, as of a conversation's last turn: the next turn goes
                on like a response between two chunks.

        Raises:
            ValueError: a request of that name is here.
        """
        if name in self._requests:
            raise ValueError(f"request {name} has come twice: it must finish or be aborted first")
        self.note("arrive", name, group, prompt_tokens, limit, expected, near)
        home = self._waiting.group(group)
        home.members += 1
        if expected is not None:
            self._waiting.expect(home, expected)
        self._requests[name] = request = Request(name, home, prompt_tokens, limit, replica=self._replicas.get(near))
        if near is not None:
            _pause(request)
        self._waiting.add(request)

    def proceed(self, name: str, emitted: int) -> None:
        """The chunk of a running request has ended, after `emitted` tokens, and its response goes on."""
        request = self._requests[name]
        self.note("proceed", name, emitted)
        self._leave(request)
        request.generated += emitted
        self._waiting.learn(request.group, request.generated, finished=False)
        _pause(request)
        self._waiting.add(request)

    def finish(self, name: str, emitted: int) -> None:
        """A response is complete, its last chunk after `emitted` tokens; unknown requests are ignored."""
        if (request := self._requests.get(name)) is None:
            return
        self.note("finish", name, emitted)
        length, group = request.generated + emitted, request.group
        if group.known:
            self.counters["estimates"] += 1
            self.counters["estimate_error"] += abs(round(group.estimate) - length)
        self._waiting.learn(group, length, finished=True)
        self._drop(request)

    def abort(self, name: str) -> None:
        """A request is given up, whether it waits or runs; its length says nothing about its group."""
        if (request := self._requests.get(name)) is None:
            return
        self.note("abort", name)
        if request.group.probe == name:
            request.group.probe = None
        self._drop(request)
        self._waiting.requeue(request.group)

    def decide(self) -> list[Start]:
        """Start what there is room for, most urgent first."""
        starts = []
        while (request := self._waiting.next()) and (replica := self._choose(request)):
            starts.append(self._start(request, replica))
        if starts:
            self.note("decide", self.waiting, starts)
        return starts

    def _choose(self, request: Request) -> Replica | None:
        if not self._replicas:
            return None
        least = min(self._replicas.values(), key=lambda replica: replica.load)
        need, own, home = self._need(request), request.replica, request.group.home
        if own is not None and own.fits(need) and not _should_move(request, own, least):
            return own
        if home is not None and home.fits(need) and home.load <= least.load + 1 / NEAR:
            if home.has_slot or not least.has_slot:
                return home
        if least.fits(need):
            return least
        self.counters["held_by_kv"] += least.has_slot
        return None

    def _need(self, request: Request) -> int:
        """Tokens of KV cache to the end of its chunk."""
        return request.context + self._chunk(request) + self.settings.lookahead_tokens

    def _chunk(self, request: Request) -> int:
        left = max(1, request.limit - request.generated)
        return min(left, self.settings.chunk_tokens or left)

    def _start(self, request: Request, replica: Replica) -> Start:
        if request.state == "paused" and request.replica is not replica:
            self.counters["moves"] += 1
            self.counters["prefill_tokens"] += request.context  # which another replica computes again
        group = request.group
        group.probe, group.home = group.probe or request.name, replica
        self._waiting.remove(request, "running")
        request.replica, request.reserved = replica, replica.blocks(self._need(request))
        replica.running.add(request.name)
        replica.reserved += request.reserved
        self.counters["admissions"] += 1
        return Start(request.name, replica.name, self._chunk(request))

    @staticmethod
    def _leave(request: Request) -> None:
        """The request no longer runs at its replica, if that is still there."""
        if (replica := request.replica) is not None and replica.alive:
            replica.running.discard(request.name)
            replica.reserved -= request.reserved

    def _drop(self, request: Request) -> None:
        if request.state == "running":
            self._leave(request)
            request.state = "gone"
        else:
            self._waiting.remove(request, "gone")
        del self._requests[request.name]
        request.group.members -= 1
        if not request.group.members:
            del self._waiting.groups[request.group.name]


def _pause(request: Request) -> None:
    """Let it wait among those that go on, the longest expected first.

    A response as long as its group's longest so far is that longest itself: without a share of its own length it would
    go on last of all, and the rollout would end with it.
    """
    group, limit, generated = request.group, request.limit, request.generated
    expected = min(group.longest if group.known else limit, limit)
    left = max(expected - generated, min(generated // LASTS, limit - generated))
    request.state, request.priority = "paused", -max(1, left)


def _should_move(request: Request, own: Replica, least: Replica) -> bool:
    """Whether a request between chunks should leave the replica that has its KV cache for a far emptier one."""
    here, there = len(own.running) + 1, len(least.running) + 1
    worth = request.context <= MOVE_TOKENS * -request.priority
    return here >= MOVE_AT * there and here - there >= MOVE_LEAST and worth
