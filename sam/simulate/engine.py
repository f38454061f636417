"""A rollout played event by event: routed, queued, drafted, verified, until the last response is complete."""

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from sam.simulate.drafting import Drafting
from sam.simulate.lengths import Round
from sam.simulate.replica import Replica
from sam.simulate.routing import Router
from sam.switch.goodput import CONTEXT_BUCKET
from sam.switch.interpolation import Grid, interpolate
from sam.switch.policy import Policy
from sam.switch.step_cost import StepCost
from sam.vllm.ranks import max_num_tokens_other

TOTALS = ("drafted", "accepted", "verified", "emitted")
# A step with drafts, or a series of steps without: when it ended, how many steps, requests of the largest replica.
STEPS = np.dtype(
    [("end_ms", "f8"), ("steps", "i8"), ("running", "i8"), ("switched_on", "?"), *((name, "i8") for name in TOTALS)]
)


@dataclass(frozen=True)
class Cluster:
    """The machines that a rollout runs on.

    Attributes:
        replicas: number of inference replicas.
        max_num_seqs: requests that run at once on a replica; the others wait, first come first served.
        dp_synchronous: whether the replicas are data-parallel ranks of one engine, in which every step waits for the
            slowest rank, as expert parallelism needs it; otherwise each runs on its own.
        admit_ms: milliseconds that a new request adds to its first step, in which its prompt is read.
        kv_tokens: tokens that the KV cache of a replica holds; 0: no bound.
        read_ms: milliseconds that each token of context that a request brings along adds to its first step.
    """

    replicas: int = 1
    max_num_seqs: int = 128
    dp_synchronous: bool = False
    admit_ms: float = 0.0
    kv_tokens: int = 0
    read_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("max_num_seqs", 1), ("admit_ms", 0), ("kv_tokens", 0), ("read_ms", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {least}")


class Engine:
    """Replicas that step together: one, or all ranks of a data-parallel synchronous cluster.

    Attributes:
        clock: milliseconds since the round began.
        timeline: rows of STEPS.
    """

    def __init__(self, replicas: list[Replica], cost: Grid, cluster: Cluster):
        self._replicas, self._cost, self._cluster = replicas, cost, cluster
        self.clock = 0.0
        self.timeline: list[tuple] = []

    def advance(self) -> int:
        """Play one step, or all steps until something changes.

        Returns:
            The tokens that were generated; -1 while there is nothing to do.
        """
        admitted = [replica.admit(self.clock) for replica in self._replicas]
        for replica in self._replicas:
            replica.preempt(self.clock)
        busy = [replica for replica in self._replicas if len(replica)]
        if not busy:
            arrival = min(replica.next_arrival for replica in self._replicas)
            if arrival == float("inf"):
                return -1
            self.clock = arrival
            return 0
        largest = max(len(replica) for replica in busy)
        others = max_num_tokens_other_ranks(busy)
        budgets = [replica.make_plan(num_tokens) for replica, num_tokens in zip(busy, others, strict=True)]
        if not any(budgets) and (steps := self._uneventful(busy)) > 1:
            self._jump(busy, steps)
        else:
            steps = 1
            self._step(busy, sum(admitted))
        total = [sum(getattr(replica, name) for replica in busy) for name in TOTALS]
        on = any(replica.switch_on for replica in busy)
        self.timeline.append((self.clock, steps, largest, on, *total))
        return total[-1]

    def _uneventful(self, busy: list[Replica]) -> int:
        """Steps until a request finishes or may arrive, or the context has grown enough to ask the policies again."""
        if any(replica.fresh or replica.read or not replica.steady for replica in busy):
            return 1
        if any(self.clock < replica.next_arrival < float("inf") for replica in self._replicas):
            return 1
        knots = (self._steps_to_knot(replica.context) for replica in busy)
        room = (replica.steps_that_fit for replica in busy)
        return min(CONTEXT_BUCKET, *(replica.until_finish for replica in busy), *room, *knots)

    def _steps_to_knot(self, context: float) -> int:
        """Steps until costs are no longer linear in the context."""
        knots = self._cost.context
        following = int(np.searchsorted(knots, context, side="right"))
        return max(1, int(knots[following] - context) + 1) if following < len(knots) else 1 << 60

    def _step_ms(self, requests: int, num_tokens: int, context: float) -> float:
        return interpolate(self._cost, float(requests), float(num_tokens), context)

    def _jump(self, busy: list[Replica], steps: int) -> None:
        # Costs are linear in the context meanwhile: the middle step costs the mean.
        middle = (steps - 1) / 2
        each = max(self._step_ms(len(r), len(r), r.context + middle) for r in busy)
        self.clock += each * steps
        for replica in busy:
            replica.jump(steps)
            replica.finish_step(each, observed=False)

    def _step(self, busy: list[Replica], admitted: int) -> None:
        slowest = 0.0
        observed = admitted == 0 and not any(replica.fresh or replica.read for replica in busy)
        for replica in busy:
            running, context = len(replica), replica.context
            replica.step()
            slowest = max(slowest, self._step_ms(running, replica.num_tokens, context))
        slowest += self._cluster.admit_ms * admitted
        slowest += self._cluster.read_ms * max(replica.read for replica in busy)
        for replica in busy:
            replica.read = 0
        self.clock += slowest
        for replica, num_tokens in zip(busy, max_num_tokens_other_ranks(busy), strict=True):
            replica.finish_step(slowest, observed, num_tokens)


def max_num_tokens_other_ranks(replicas: list[Replica]) -> list[int]:
    """For each rank the tokens of the largest last step of the others, 0 without others: all that vLLM's ranks know."""
    counts = [replica.num_tokens for replica in replicas]
    # No count is padded to the largest here: of two equal ones each is the other rank's own.
    return [max_num_tokens_other(counts, rank, own=0) for rank in range(len(counts))]


@dataclass(frozen=True)
class Played:
    """A round that has been played.

    Attributes:
        timelines: of each engine, STEPS [rows].
        counts: preempted requests; read_again, tokens of context; moves of chunks between replicas.
        finished_ms: float64 [requests], when each response was complete.
    """

    timelines: list[np.ndarray]
    counts: dict[str, int] = field(default_factory=dict)
    finished_ms: np.ndarray = field(default_factory=lambda: np.zeros(1))

    @property
    def seconds(self) -> np.ndarray:
        """float64 [engines], when each engine finished."""
        return np.array([t["end_ms"][-1] / 1e3 if len(t) else 0.0 for t in self.timelines])

    @property
    def last_tenth_seconds(self) -> float:
        """Seconds from when nine tenths of the responses were complete until all were."""
        return float((self.finished_ms.max() - np.quantile(self.finished_ms, 0.9, method="lower")) / 1e3)


def play(
    work: Round,
    cluster: Cluster,
    router: Router,
    cost: StepCost,
    policies: list[Policy],
    drafting: list[Drafting],
    progress: Callable[[int], object] | None = None,
) -> Played:
    """Play a round to its end.

    Args:
        router: says which request goes on where, when requests arrive and when chunks end.
        policies, drafting: of each replica.
        progress: called with the tokens generated since the last call.

    Raises:
        RuntimeError: the router has left requests waiting.
    """
    generated, targets = np.zeros(len(work), dtype=np.int64), np.zeros(len(work), dtype=np.int64)
    finished_ms = np.zeros(len(work))
    replicas = [
        Replica(work, generated, targets, cluster.max_num_seqs, *parts, cluster.kv_tokens)
        for parts in zip(policies, drafting, strict=True)
    ]
    parts = [replicas] if cluster.dp_synchronous else [[replica] for replica in replicas]
    engines = [Engine(part, cost.grid, cluster) for part in parts]
    # The engine with the earliest clock goes first, so that a drafter that they share sees tokens in the order of time,
    # and so that a chunk's end is known when the next one is decided.
    waiting, asleep = [(0.0, i) for i in range(len(engines))], set()

    def place(now: float) -> None:
        for request, replica, target, cached in router.decide(generated):
            targets[request] = target
            replicas[replica].enqueue(request, now, cached)
            if (engine := 0 if cluster.dp_synchronous else replica) in asleep:
                asleep.discard(engine)
                engines[engine].clock = max(engines[engine].clock, now)
                heapq.heappush(waiting, (engines[engine].clock, engine))

    while waiting or router.next_arrival < float("inf"):
        now = min(waiting[0][0] if waiting else float("inf"), max(router.next_arrival, 0.0))
        if router.next_arrival <= now:
            router.arrive(now)
            place(now)
            continue
        now, i = heapq.heappop(waiting)
        # An engine may have played many steps at once: what they ended counts when the others have come as far.
        for number in range(len(replicas)) if cluster.dp_synchronous else (i,):
            finished_ms[replicas[number].ended] = now  # of a chunk's end it is written again later
            for request in replicas[number].ended:
                router.end(request, number, int(generated[request]))
            replicas[number].ended.clear()
        place(now)
        emitted = engines[i].advance()
        if emitted < 0:
            asleep.add(i)
            continue
        heapq.heappush(waiting, (engines[i].clock, i))
        if progress:
            progress(emitted)
    if (generated < work.lengths).any():
        raise RuntimeError(f"{(generated < work.lengths).sum()} requests were never finished: the router holds them")
    counts = {name: sum(getattr(replica, name) for replica in replicas) for name in ("preempted", "read_again")}
    return Played(
        [np.array(engine.timeline, STEPS) for engine in engines], counts | {"moves": router.moves}, finished_ms
    )
