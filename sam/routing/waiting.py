"""The requests that wait, and which of them is next."""

import math
from collections import deque

from sam.routing.lazy_heap import SPARE_ENTRIES, LazyHeap
from sam.routing.state import Group, Request

TYPICAL_OF = 1024  # responses over which the typical length is averaged
# Responses of the typical length that a group's estimate begins with. In recordings lengths vary about twice as much
# within a prompt as between prompts (sam.simulate.rollout: a correlation of 0.35), which asks for about this weight.
PRIOR_RESPONSES = 2
# What is expected of a new response, as a multiple of what one between two chunks is expected to come to, from which it
# goes first. Where the KV cache is full there is always one between two chunks, and a long group would start last. One
# that has to wait may lose its KV cache, so that being a little longer is not enough.
SOONER = 2


class Waiting:
    """Orders waiting requests: overdue ones, those between two chunks unless a new one is expected to be far longer,
    probes, then the longest expected.

    Args:
        max_wait: admissions after which a request is overdue.
        shows_progress: whether lengths of unfinished responses become known, at the ends of their chunks.

    Attributes:
        operations: [int], entries of heaps pushed, popped or looked at so far.
        groups: by name, those with requests that have not finished.
        typical: geometric mean of the last responses' tokens.
    """

    def __init__(self, max_wait: int, shows_progress: bool, operations: list[int]):
        self._max_wait, self._shows_progress, self.operations = max_wait, shows_progress, operations
        self.groups: dict[str, Group] = {}
        self._typical_log = 0.0
        self._num_waiting = self._groups_seen = self._requests_seen = self._responses = 0
        self._unprobed = LazyHeap(_unprobed, operations)
        self._known = LazyHeap(lambda group: _longest_first(group, known=True), operations)
        self._unknown = LazyHeap(lambda group: _longest_first(group, known=False), operations)
        self._paused = LazyHeap(_paused, operations)
        self._oldest: deque[tuple[int, Request]] = deque()

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def typical(self) -> float:
        return math.exp(self._typical_log)

    @property
    def entries(self) -> int:
        """Entries of all tables: what the memory grows with."""
        heaps = (self._unprobed, self._known, self._unknown, self._paused, self._oldest, self.groups)
        return sum(map(len, heaps)) + sum(len(group.waiting) for group in self.groups.values())

    def group(self, name: str) -> Group:
        """The group of that name, a new one if there is none."""
        if name not in self.groups:
            self.groups[name] = Group(name, self._groups_seen)
            self._groups_seen += 1
        return self.groups[name]

    def add(self, request: Request, admissions: int) -> None:
        """A new or paused request begins to wait, after `admissions` in all."""
        self._requests_seen += 1
        request.order, request.since = self._requests_seen, admissions
        self._num_waiting += 1
        self._oldest.append((request.order, request))
        if request.state == "paused":
            self._paused.push(request, self._num_waiting)
        else:
            request.group.waiting.append(request)
            request.group.num_waiting += 1
            self.requeue(request.group)
        if len(self._oldest) > 2 * self._num_waiting + SPARE_ENTRIES:
            self.operations[0] += len(self._oldest)
            self._oldest = deque(entry for entry in self._oldest if _still_waits(entry))

    def remove(self, request: Request, state: str) -> None:
        """A request waits no longer: it is running, or gone."""
        self._num_waiting -= 1
        was_new, request.state = request.state == "new", state
        if was_new:
            request.group.num_waiting -= 1
            self.requeue(request.group)

    def next(self, admissions: int, settled: bool) -> Request | None:
        """The request to start now; None if there is none, or none to start before more have come."""
        if (overdue := self._overdue(admissions)) is not None:
            return overdue
        between, group = self._paused.first(), self._unprobed.first()
        if group is None and settled and (group := self._longest_group()) is not None:
            if between is not None and group.estimate > SOONER * between.expected:
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
            heap.push(group, len(self.groups))

    def _overdue(self, admissions: int) -> Request | None:
        while self._oldest:
            self.operations[0] += 1
            if _still_waits(self._oldest[0]):
                request = self._oldest[0][1]
                return request if admissions - request.since >= self._max_wait else None
            self._oldest.popleft()
        return None

    def _longest_group(self) -> Group | None:
        """The group of which most is expected. One of unknown length comes before those that are typical or short, and,
        where its probe's progress is not known, before all: the probes that run on are the long ones."""
        known, unknown = self._known.first(), self._unknown.first()
        if known is None or unknown is None or not self._shows_progress:
            return unknown or known
        return known if known.estimate > max(self.typical, unknown.estimate) else unknown

    def _first_of(self, group: Group) -> Request:
        while group.waiting[0].state != "new":
            self.operations[0] += 1
            group.waiting.popleft()
        return group.waiting[0]


def _still_waits(entry: tuple[int, Request]) -> bool:
    order, request = entry
    return request.order == order and request.state in ("new", "paused")


def _unprobed(group: Group) -> tuple | None:
    return (group.order,) if group.num_waiting and group.probe is None and not group.known else None


def _longest_first(group: Group, known: bool) -> tuple | None:
    started = group.known or group.probe is not None
    return (-group.estimate, group.order) if group.num_waiting and started and group.known == known else None


def _paused(request: Request) -> tuple | None:
    return (request.priority, request.order) if request.state == "paused" else None
