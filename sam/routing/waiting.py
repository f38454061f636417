"""Replicas, groups and requests as a routing policy knows them, and which of the waiting requests is next."""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

SPARE_ENTRIES = 64  # that a heap may have grown by since stale ones were last looked for, beside doubling
TYPICAL_OF = 1024  # responses over which the typical length is averaged
# Responses of the typical length that a group's estimate begins with. In recordings lengths vary about twice as much
# within a prompt as between prompts (a correlation of 0.35), which asks for about this weight.
PRIOR_RESPONSES = 2
# What is expected of a new response, as a multiple of what one between two chunks is expected to come to, from which it
# goes first. Where the KV cache is full there is always one between two chunks, and a long group would start last. One
# that has to wait may lose its KV cache, so that being a little longer is not enough.
SOONER = 2


@dataclass(slots=True, eq=False)
class Replica:
    """An engine, its limits, and what the router has put there.

    Attributes:
        kv_tokens: tokens that its KV cache holds, in blocks of `block_tokens`.
        slots: requests that run at once (vLLM's max_num_seqs).
        ahead: requests beyond its slots that it is given to wait there.
        running: names of the requests that run there, or wait there for a slot.
        reserved: tokens of KV cache, in whole blocks, that these need to the end of their chunks.
    """

    name: str
    kv_tokens: int
    slots: int
    block_tokens: int = 16
    ahead: int = 0
    running: set[str] = field(default_factory=set)
    reserved: int = 0
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
    """The requests of one prompt.

    Attributes:
        order: the order in which groups came.
        members: requests that have come and not finished.
        waiting: those that never started, in the order in which they came, and some that were given up.
        num_waiting: those of them that still wait.
        longest: tokens of the longest response so far, finished or not; or a length that was known beforehand.
        known: whether its responses' lengths can be estimated: one has finished, or they were known beforehand.
        prior: tokens that were expected beforehand; None: as many as of other groups.
        finished, log_sum: responses that have finished, and the sum of the logarithms of their lengths.
        estimate: tokens expected of a response, as of the last that finished; without one, `longest`.
        probe: the request that runs ahead of the others; None before it starts.
        home: the replica at which its last request started.
    """

    name: str
    order: int
    members: int = 0
    waiting: deque = field(default_factory=deque)
    num_waiting: int = 0
    longest: int = 0
    known: bool = False
    prior: int | None = None
    finished: int = 0
    log_sum: float = 0.0
    estimate: float = 0.0
    probe: str | None = None
    home: Replica | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One response to generate.

    Attributes:
        limit: most tokens of the response.
        generated: tokens that it has.
        order: the order in which requests began to wait; a request that goes on after a chunk begins again.
        replica: where it runs, or ran last.
        reserved: tokens reserved there while it runs.
        state: new, paused (between chunks or turns), running or gone.
        priority: that with which a paused request waits: the tokens that it is thought to lack, negative.
    """

    name: str
    group: Group
    prompt_tokens: int
    limit: int
    generated: int = 0
    order: int = 0
    replica: Replica | None = None
    reserved: int = 0
    state: str = "new"
    priority: int = 0

    @property
    def context(self) -> int:
        """Tokens of its prompt and its response so far."""
        return self.prompt_tokens + self.generated


class LazyHeap:
    """A heap of items in which an entry counts only while its key is the item's current one.

    Args:
        key_of: the current key of an item; None while the item is not to be taken.
    """

    def __init__(self, key_of: Callable[[object], tuple | None]):
        self._key_of = key_of
        self._entries: list[tuple] = []
        self._pushed, self._clean_at = 0, SPARE_ENTRIES

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, item) -> None:
        """Enter the item under its current key."""
        if (key := self._key_of(item)) is None:
            return
        self._pushed += 1
        heapq.heappush(self._entries, (key, self._pushed, item))
        if len(self._entries) > self._clean_at:
            self._entries = list({id(one[2]): one for one in self._entries if self._is_current(one)}.values())
            heapq.heapify(self._entries)
            self._clean_at = 2 * len(self._entries) + SPARE_ENTRIES

    def first(self):
        """The item with the smallest key, which stays; None if no item counts."""
        while self._entries and not self._is_current(self._entries[0]):
            heapq.heappop(self._entries)
        return self._entries[0][2] if self._entries else None

    def _is_current(self, entry: tuple) -> bool:
        return self._key_of(entry[2]) == entry[0]


class Waiting:
    """Orders waiting requests: those between two chunks unless a new one is expected to be far longer, probes, then the
    longest expected.

    Args:
        shows_progress: whether lengths of unfinished responses become known, at the ends of their chunks.

    Attributes:
        groups: by name, those with requests that have not finished.
    """

    def __init__(self, shows_progress: bool):
        self._shows_progress = shows_progress
        self.groups: dict[str, Group] = {}
        self._typical_log = 0.0  # of the geometric mean of the last responses' tokens
        self._num_waiting = self._groups_seen = self._requests_seen = self._responses = 0
        self._unprobed = LazyHeap(_unprobed)
        self._known = LazyHeap(lambda group: _longest_first(group, known=True))
        self._unknown = LazyHeap(lambda group: _longest_first(group, known=False))
        self._paused = LazyHeap(_paused)

    def __len__(self) -> int:
        return self._num_waiting

    def group(self, name: str) -> Group:
        """The group of that name, a new one if there is none."""
        if name not in self.groups:
            self.groups[name] = Group(name, self._groups_seen)
            self._groups_seen += 1
        return self.groups[name]

    def add(self, request: Request) -> None:
        """A new or paused request begins to wait."""
        self._requests_seen += 1
        request.order = self._requests_seen
        self._num_waiting += 1
        if request.state == "paused":
            self._paused.push(request)
        else:
            request.group.waiting.append(request)
            request.group.num_waiting += 1
            self.requeue(request.group)

    def remove(self, request: Request, state: str) -> None:
        """A request waits no longer: it is running, or gone."""
        self._num_waiting -= 1
        was_new, request.state = request.state == "new", state
        if was_new:
            request.group.num_waiting -= 1
            self.requeue(request.group)

    def next(self) -> Request | None:
        """The request to start now; None if none waits."""
        between, group = self._paused.first(), self._unprobed.first()
        if group is None and (group := self._longest_group()) is not None and between is not None:
            if group.estimate > SOONER * (between.generated - between.priority):
                return self._first_of(group)
        return between or (self._first_of(group) if group else None)

    def expect(self, group: Group, tokens: int) -> None:
        """So many tokens are expected of a response of the group, before any has finished."""
        group.prior, group.longest = max(group.prior or 0, tokens), max(group.longest, tokens)
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
        self.requeue(group)

    def requeue(self, group: Group) -> None:
        """The group's place may have changed."""
        for heap in (self._unprobed, self._known, self._unknown):
            heap.push(group)

    def _longest_group(self) -> Group | None:
        """The group of which most is expected. One of unknown length comes before those that are typical or short, and,
        where its probe's progress is not known, before all: the probes that run on are the long ones."""
        known, unknown = self._known.first(), self._unknown.first()
        if known is None or unknown is None or not self._shows_progress:
            return unknown or known
        return known if known.estimate > max(math.exp(self._typical_log), unknown.estimate) else unknown

    @staticmethod
    def _first_of(group: Group) -> Request:
        while group.waiting[0].state != "new":
            group.waiting.popleft()
        return group.waiting[0]


def _unprobed(group: Group) -> tuple | None:
    return (group.order,) if group.num_waiting and group.probe is None and not group.known else None


def _longest_first(group: Group, known: bool) -> tuple | None:
    started = group.known or group.probe is not None
    return (-group.estimate, group.order) if group.num_waiting and started and group.known == known else None


def _paused(request: Request) -> tuple | None:
    return (request.priority, request.order) if request.state == "paused" else None
