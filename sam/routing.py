"""Which request starts where and when: probe first, longest first, no more than the KV cache holds.

After Seer (arXiv 2511.14617): one request of each group runs ahead as a probe; the lengths of a group's finished
responses say what is expected of the others; groups of which more is expected start earlier, so that no long response
is left for the end. The policy knows no clock, no Ray and no engine: it is told events and says which waiting request
starts at which replica. Equal events give equal decisions.
"""

import math
from dataclasses import dataclass, field
from typing import NamedTuple

MOVE_AT = 2  # times the running requests of the least loaded replica from which a chunk moves there
MOVE_LEAST = 4  # and running requests more than there
MOVE_TOKENS = 4  # tokens of context read again for each token expected, up to which a move pays
LASTS = 2  # a response is expected to go on by 1/2 of its length at least (log-normal, sigma 0.8, at thrice its median)
NEAR = 16  # a sibling's replica is taken while it is at most 1/16 of its slots fuller than the least loaded
TYPICAL_OF = 1024  # responses over which the typical length is averaged
# Responses of the typical length that a group's estimate begins with. In recordings lengths vary about twice as much
# within a prompt as between prompts (a correlation of 0.35), which asks for about this weight.
PRIOR_RESPONSES = 2
# What is expected of a new response, as a multiple of what one between two chunks is expected to come to, from which it
# goes first. Where the KV cache is full there is always one between two chunks, and a long group would start last. One
# that has to wait may lose its KV cache, so that being a little longer is not enough.
SOONER = 2


class Start(NamedTuple):
    """A decision: `request` starts a chunk of up to `tokens` tokens at `replica`."""

    request: str
    replica: str
    tokens: int


@dataclass(frozen=True)
class RoutingSettings:
    """What a policy is made for; ValueError if chunk_tokens is out of range."""

    chunk_tokens: int | None = None  # of a response that are generated before it is routed anew; None: all of them
    lookahead_tokens: int = 0  # beyond its text that an engine reserves KV cache for, as drafts
    # Requests that a replica is given beyond its slots, once no replica has a free one: they wait in the engine, which
    # then fills a slot in the step after it became free, instead of a message's way later.
    ahead: int = 0

    def __post_init__(self) -> None:
        chunk = self.chunk_tokens
        if chunk is not None and (type(chunk) is not int or chunk < 1):
            raise ValueError(f"routing.chunk_tokens={chunk}: expected an integer of at least 1, or null for no chunks")


@dataclass(slots=True, eq=False)
class Replica:
    """An engine, its limits, and what the router has put there."""

    name: str
    kv_tokens: int  # that its KV cache holds, in blocks of `block_tokens`
    slots: int  # requests that run at once (vLLM's max_num_seqs)
    block_tokens: int
    ahead: int
    running: set[str] = field(default_factory=set)  # names of the requests that run there, or wait there for a slot
    reserved: int = 0  # tokens of KV cache, in whole blocks, that these need to the end of their chunks
    alive: bool = True

    def blocks(self, tokens: int) -> int:
        """`tokens` rounded up to whole blocks, in tokens."""
        return -(-tokens // self.block_tokens) * self.block_tokens

    def fits(self, tokens: int) -> bool:
        """Whether a request that needs `tokens` to the end of its chunk has a slot and KV cache; alone it always fits,
        since vLLM itself refuses a max_model_len that its cache cannot hold."""
        if not self.alive or len(self.running) >= self.slots + self.ahead:
            return False
        return not self.running or self.reserved + self.blocks(tokens) <= self.kv_tokens

    @property
    def has_slot(self) -> bool:
        """Whether a request that comes would run at once."""
        return len(self.running) < self.slots

    @property
    def load(self) -> float:
        """The share of its slots or of its KV cache that is taken, whichever is larger."""
        return max(len(self.running) / self.slots, self.reserved / self.kv_tokens)


@dataclass(slots=True, eq=False)
class Group:
    """The requests of one prompt."""

    name: str
    members: int = 0  # requests that have come and not finished
    waiting: dict[str, "Request"] = field(default_factory=dict)  # those that never started, in their order
    longest: int = 0  # tokens of the longest response so far, finished or not, or that was known beforehand
    known: bool = False  # whether lengths can be estimated: a response has finished, or they were known beforehand
    prior: int | None = None  # tokens that were expected beforehand; None: as many as of other groups
    finished: int = 0  # responses that have finished
    log_sum: float = 0.0  # of the logarithms of their lengths
    estimate: float = 0.0  # tokens expected of a response, as of the last that finished; without one, `longest`
    probe: str | None = None  # the request that runs ahead of the others; None before it starts
    home: Replica | None = None  # at which its last request started


@dataclass(slots=True, eq=False)
class Request:
    """One response to generate."""

    name: str
    group: Group
    prompt_tokens: int
    limit: int  # most tokens of the response
    replica: Replica | None  # where it runs, or ran last
    generated: int = 0  # tokens that it has
    reserved: int = 0  # tokens reserved there while it runs
    left: int = 0  # tokens that it was thought to lack when it paused, between chunks or turns; 0: it never did

    @property
    def context(self) -> int:
        """Tokens of its prompt and its response so far."""
        return self.prompt_tokens + self.generated

    def pause(self) -> None:
        """Let it wait among those that go on, the longest expected first.

        A response as long as its group's longest so far is that longest itself: without a share of its own length it
        would go on last of all, and the rollout would end with it.
        """
        expected = min(self.group.longest, self.limit) if self.group.known else self.limit
        lasts = min(self.generated // LASTS, self.limit - self.generated)
        self.left = max(1, expected - self.generated, lasts)


class Waiting:
    """Orders waiting requests: those between two chunks unless a new one is expected to be far longer, probes, then the
    longest expected. Of equals the first that came goes first."""

    def __init__(self, shows_progress: bool):
        self._shows_progress = shows_progress  # whether unfinished responses' lengths become known, by their chunks
        self.groups: dict[str, Group] = {}  # those with requests that have not finished
        self._paused: dict[str, Request] = {}
        self._typical_log = 0.0  # of the geometric mean of the last responses' tokens
        self._responses = 0  # of which it is the mean

    def add(self, request: Request) -> None:
        """A new or paused request begins to wait."""
        waiting = self._paused if request.left else request.group.waiting
        waiting[request.name] = request

    def remove(self, request: Request) -> None:
        """A request waits no longer, if it did: it is running, or gone."""
        self._paused.pop(request.name, None)
        request.group.waiting.pop(request.name, None)

    def next(self) -> Request | None:
        """The request to start now; None if none waits."""
        between = max(self._paused.values(), key=lambda request: request.left, default=None)
        groups = [group for group in self.groups.values() if group.waiting]
        unknown = [group for group in groups if not group.known]
        group = next((group for group in unknown if group.probe is None), None)
        if group is None:
            known = [group for group in groups if group.known]
            group = self._longest(_most_expected(known), _most_expected(unknown))
            if group and between and group.estimate > SOONER * (between.generated + between.left):
                between = None
        if between or group is None:
            return between
        return next(iter(group.waiting.values()))

    def expect(self, group: Group, tokens: int) -> None:
        """So many tokens are expected of a response of the group, before any has finished."""
        group.prior = max(group.prior or 0, tokens)
        group.longest = max(group.longest, tokens)
        group.known = True
        self._estimate(group)

    def learn(self, group: Group, tokens: int, finished: bool) -> None:
        """A response of the group has `tokens` tokens, and may have finished with them."""
        if finished:
            self._responses = min(self._responses + 1, TYPICAL_OF)
            self._typical_log += (math.log(max(1, tokens)) - self._typical_log) / self._responses
            group.finished += 1
            group.log_sum += math.log(max(1, tokens))
            group.known = True
        if finished or tokens > group.longest:
            group.longest = max(group.longest, tokens)
            self._estimate(group)

    def _estimate(self, group: Group) -> None:
        """The geometric mean of its responses and of PRIOR_RESPONSES more of the length expected beforehand: one long
        response alone does not make a group a long one."""
        if group.known:
            prior = self._typical_log if group.prior is None else math.log(max(1, group.prior))
            weight = PRIOR_RESPONSES + group.finished
            group.estimate = math.exp((PRIOR_RESPONSES * prior + group.log_sum) / weight)
        else:
            group.estimate = group.longest

    def _longest(self, known: Group | None, unknown: Group | None) -> Group | None:
        """The group of which most is expected. One of unknown length comes before those that are typical or short, and,
        where its probe's progress is not known, before all: the probes that run on are the long ones."""
        if known is None or unknown is None or not self._shows_progress:
            return unknown or known
        return known if known.estimate > max(math.exp(self._typical_log), unknown.estimate) else unknown


def _most_expected(groups: list[Group]) -> Group | None:
    return max(groups, key=lambda group: group.estimate, default=None)


class ContextPolicy:
    """Holds the requests of a rollout and starts them where and when there is room. Events are methods; `decide`
    returns what starts as their consequence.

    Attributes:
        counters: admissions; prefill_tokens, that moves made replicas read again; held_by_kv, decisions that waited for
            KV cache.
    """

    def __init__(self, settings: RoutingSettings):
        self.settings = settings
        self.counters = dict.fromkeys(("admissions", "prefill_tokens", "held_by_kv"), 0)
        self._replicas: dict[str, Replica] = {}
        self._requests: dict[str, Request] = {}
        self._waiting = Waiting(shows_progress=settings.chunk_tokens is not None)

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return len(self._requests) - sum(self.running().values())

    def running(self) -> dict[str, int]:
        """Requests that run at each replica."""
        return {name: len(replica.running) for name, replica in self._replicas.items()}

    def add_replica(self, name: str, kv_tokens: int, slots: int, block_tokens: int = 16) -> None:
        """A replica has come, or has come again."""
        self.remove_replica(name)
        self._replicas[name] = Replica(name, kv_tokens, slots, block_tokens, self.settings.ahead)

    def remove_replica(self, name: str) -> None:
        """A replica is gone; the requests that ran there go on with `proceed`."""
        if name in self._replicas:
            self._replicas.pop(name).alive = False

    def arrive(
        self,
        name: str,
        group: str,
        prompt_tokens: int,
        limit: int,
        expected: int | None = None,
        near: str | None = None,
    ) -> None:
        """A request of the prompt `group` has come, for a response of at most `limit` tokens.

        Args:
            expected: tokens that its group's responses are thought to have beforehand, as of an earlier epoch.
            near: the replica that has the KV cache of its prompt, as of a conversation's last turn: the next turn goes
                on like a response between two chunks.
        """
        if name in self._requests:
            raise ValueError(f"request {name} has come twice: it must finish or be aborted first")
        own_group = self._waiting.groups.setdefault(group, Group(group))
        own_group.members += 1
        if expected is not None:
            self._waiting.expect(own_group, expected)
        request = Request(name, own_group, prompt_tokens, limit, self._replicas.get(near))
        self._requests[name] = request
        if near is not None:
            request.pause()
        self._waiting.add(request)

    def proceed(self, name: str, emitted: int) -> None:
        """The chunk of a running request has ended, after `emitted` tokens, and its response goes on."""
        request = self._requests[name]
        self._leave(request)
        request.generated += emitted
        self._waiting.learn(request.group, request.generated, finished=False)
        request.pause()
        self._waiting.add(request)

    def finish(self, name: str, emitted: int) -> None:
        """A response is complete, its last chunk after `emitted` tokens; unknown requests are ignored."""
        request = self._requests.get(name)
        if request is None:
            return
        self._waiting.learn(request.group, request.generated + emitted, finished=True)
        self._drop(request)

    def abort(self, name: str) -> None:
        """A request is given up, whether it waits or runs; its length says nothing about its group."""
        request = self._requests.get(name)
        if request is None:
            return
        if request.group.probe == name:
            request.group.probe = None
        self._drop(request)

    def decide(self) -> list[Start]:
        """Start what there is room for, most urgent first."""
        starts = []
        while True:
            request = self._waiting.next()
            replica = self._choose(request) if request else None
            if replica is None:
                return starts
            starts.append(self._start(request, replica))

    def _choose(self, request: Request) -> Replica | None:
        if not self._replicas:
            return None
        least = min(self._replicas.values(), key=lambda replica: replica.load)
        need = self._need(request)
        own = request.replica
        home = request.group.home
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
        if request.left and request.replica is not replica:
            self.counters["prefill_tokens"] += request.context
        group = request.group
        group.probe = group.probe or request.name
        group.home = replica
        self._waiting.remove(request)
        request.replica = replica
        request.reserved = replica.blocks(self._need(request))
        replica.running.add(request.name)
        replica.reserved += request.reserved
        self.counters["admissions"] += 1
        return Start(request.name, replica.name, self._chunk(request))

    @staticmethod
    def _leave(request: Request) -> None:
        """The request no longer runs at its replica, if it did."""
        if request.replica is not None:
            request.replica.running.discard(request.name)
            request.replica.reserved -= request.reserved
            request.reserved = 0

    def _drop(self, request: Request) -> None:
        self._leave(request)
        self._waiting.remove(request)
        del self._requests[request.name]
        request.group.members -= 1
        if not request.group.members:
            del self._waiting.groups[request.group.name]


def _should_move(request: Request, own: Replica, least: Replica) -> bool:
    """Whether a request between chunks should leave the replica that has its KV cache for a far emptier one."""
    here = len(own.running) + 1
    there = len(least.running) + 1
    worth = request.context <= MOVE_TOKENS * request.left
    return here >= MOVE_AT * there and here - there >= MOVE_LEAST and worth
