"""A rollout played event by event: routed, queued, drafted, verified, until the last response is complete."""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sam.routing.policy import ContextPolicy, RoutingSettings
from sam.simulate.workload import Round
from sam.switch.policy import Plan, Policy, StepState
from sam.switch.step_cost import StepCost

# A step with drafts, or a series of steps without: when it ended, how many steps, requests of the largest replica,
# draft tokens, those accepted, requests that had any, and tokens generated.
COUNTS = ("drafted", "accepted", "verified", "emitted")
STEPS = np.dtype([
    ("end_ms", "f8"), ("steps", "i8"), ("running", "i8"), ("switched_on", "?"), *((name, "i8") for name in COUNTS)
])  # fmt: skip
NO_BOUND = 1 << 60  # of a replica's KV cache
MOST_STEPS = 64  # without drafts that are played at once: costs are all but linear in so few tokens of context


@dataclass(frozen=True)
class Cluster:
    """The machines that a rollout runs on.

    Attributes:
        replicas: number of inference replicas.
        max_num_seqs: requests that run at once on a replica; the others wait, first come first served.
        dp_synchronous: whether the replicas are data-parallel ranks of one engine, in which every step waits for the
            slowest rank, as expert parallelism needs it; otherwise each runs on its own.
        admit_ms: milliseconds that a new request adds to its first step, in which its prompt is read.
    """

    replicas: int = 1
    max_num_seqs: int = 128
    dp_synchronous: bool = False
    admit_ms: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("replicas", 1), ("max_num_seqs", 1), ("admit_ms", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least {least}")


class Assigned:
    """Sends each request to its replica when it arrives, to wait there, as verl's balancer does."""

    def __init__(self, work: Round, replica_of: np.ndarray):
        self._work, self._replica_of, self._new = work, replica_of, []

    def arrive(self, request: int) -> None:
        """A request has arrived."""
        self._new.append(request)

    def end(self, request: int, generated: int) -> None:
        """A request has reached its target, with `generated` tokens."""

    def decide(self, generated: np.ndarray) -> list[tuple[int, int, int]]:
        """Return what starts now: request, replica, and tokens at which it ends or comes back.

        Args:
            generated: int64 [requests], tokens of each.
        """
        new, self._new = self._new, []
        return [(i, int(self._replica_of[i]), int(self._work.lengths[i])) for i in new]


class Routed:
    """Asks the recipe's router, as `Assigned`; `chunk`: tokens after which a request comes back, 0 for never."""

    def __init__(self, work: Round, cluster: Cluster, chunk: int):
        self._work, self._limit = work, int(work.lengths.max())
        self._policy = ContextPolicy(RoutingSettings(chunk or None))
        for replica in range(cluster.replicas):
            self._policy.add_replica(str(replica), NO_BOUND, cluster.max_num_seqs, block_tokens=1)
        self._known = np.zeros(len(work), dtype=np.int64)  # tokens that the policy knows each to have

    def arrive(self, request):
        prompt, tokens = str(self._work.prompts[request]), int(self._work.prompt_tokens[request])
        self._policy.arrive(str(request), prompt, tokens, self._limit)

    def end(self, request, generated):
        emitted, self._known[request] = generated - int(self._known[request]), generated
        is_complete = generated >= self._work.lengths[request]
        (self._policy.finish if is_complete else self._policy.proceed)(str(request), emitted)

    def decide(self, generated):
        starts = [(int(name), int(replica), tokens) for name, replica, tokens in self._policy.decide()]
        return [(i, at, min(int(generated[i]) + tokens, int(self._work.lengths[i]))) for i, at, tokens in starts]


class Replica:
    """One data-parallel rank of an engine, or a whole engine: its queue, its batch, its policy and its drafts.

    Args:
        generated, targets: int64 [requests of the round], shared by all replicas: tokens that each has, and at which
            its chunk ends.
        slots: requests that run at once.
        drafts: as sam.simulate.acceptance.DrawnDrafts.

    Attributes:
        running: int64 [n], requests in the batch, in the order in which they came.
        fresh: number of those that came with this step.
        ended: requests that have reached their targets since the list was last cleared.
        counts: COUNTS of the last step.
        num_tokens: tokens of the last step, drafts included.
    """

    def __init__(self, work: Round, generated, targets, slots: int, policy: Policy, drafts):
        self._work, self._generated, self._targets, self._slots = work, generated, targets, slots
        self._policy, self._drafts = policy, drafts
        self.queue: deque[int] = deque()
        self.running, self.ended = np.empty(0, np.int64), []
        self.fresh = self.num_tokens = 0
        self.counts, self.switch_on = (0, 0, 0, 0), False
        self._state, self._plan, self._steps = StepState(0), Plan(0), 0  # and steps since it was made

    @property
    def context(self) -> float:
        """Mean tokens of a running request."""
        return float((self._work.prompt_tokens[self.running] + self._generated[self.running]).mean())

    @property
    def until_end(self) -> int:
        """Tokens until the first running request reaches its target."""
        return int((self._targets[self.running] - self._generated[self.running]).min())

    def admit(self) -> int:
        """Take requests into the batch, first come first served, while there are slots; returns their number."""
        new = [self.queue.popleft() for _ in range(min(len(self.queue), self._slots - len(self.running)))]
        for request in new:
            self._drafts.start(request)
        self.running = np.append(self.running, new).astype(np.int64)
        self.fresh = len(new)
        return len(new)

    def plan(self, num_tokens_other: int) -> int:
        """Ask the policy for a plan unless its last one is valid; returns the steps that are sure to have no drafts."""
        if len(self.running) != self._state.running or self._steps > self._plan.valid_for_steps:
            steps = max(1, self._steps)
            self._state = StepState(len(self.running), self.fresh, 0, self.context, num_tokens_other, steps)
            self._plan, self._steps = self._policy.plan(self._state), 0
        return 0 if self._plan.budget else 1 + self._plan.valid_for_steps - self._steps

    def step(self, steps: int) -> None:
        """Draft, verify and advance by a step, or by `steps` steps without drafts."""
        running, before = self.running, self._generated[self.running]
        tokens, counts, self.switch_on = np.full(len(running), steps), (0, 0, 0), False
        if self._plan.budget and self.fresh < len(running):
            budgets = np.where(before > 0, self._plan.budget, 0)
            acceptance, offsets = self._drafts.draft(running, before, budgets, self._plan.min_acceptance)
            lengths = self._policy.choose(self._state, acceptance, offsets)
            left = self._targets[running] - before
            accepted = np.minimum(self._drafts.verify(lengths), left)
            tokens = np.minimum(accepted + 1, left)
            counts = int(lengths.sum()), int(accepted.sum()), int(np.count_nonzero(lengths))
            self.switch_on = counts[0] > 0 or not len(acceptance)
        self._generated[running] += tokens
        self.counts, self.num_tokens = (*counts, int(tokens.sum())), len(running) + counts[0]
        self._steps += steps

    def end_step(self, milliseconds: float, is_observed: bool, num_tokens_other: int) -> None:
        """Show the step's tokens to the drafter and its time to the policy, and let go of what has ended.

        Args:
            num_tokens_other: tokens of the largest batch of the other ranks in this step; `plan` is given that of the
                step before.
        """
        running, generated = self.running, self._generated[self.running]
        self._drafts.append(running, generated)
        if is_observed and not self._plan.valid_for_steps:
            state = replace(self._state, max_num_tokens_other_dp_ranks=num_tokens_other)
            self._policy.observe(state, *self.counts[:2], milliseconds)
        is_ended = generated >= self._targets[running]
        if is_ended.any():
            self.ended += running[is_ended].tolist()
            self.running = running[~is_ended]
            for request in running[is_ended].tolist():
                self._drafts.finish(request)


class Engine:
    """Replicas that step together: one, or all ranks of a data-parallel synchronous cluster.

    Attributes:
        clock: milliseconds since the round began.
        timeline: rows of STEPS.
    """

    def __init__(self, replicas: list[Replica], cost: StepCost, admit_ms: float):
        self.replicas, self._cost, self._admit_ms = replicas, cost, admit_ms
        self.clock = 0.0
        self.timeline: list[tuple] = []

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return any(len(replica.running) or replica.queue for replica in self.replicas)

    def advance(self, may_jump: bool) -> int:
        """Play one step or, if it may jump, all steps without drafts until something changes.

        Returns:
            The tokens that were generated.
        """
        admitted = sum(replica.admit() for replica in self.replicas)
        busy = [replica for replica in self.replicas if len(replica.running)]
        quiet = [replica.plan(most) for replica, most in zip(busy, num_tokens_others(busy), strict=True)]
        steps = 1
        if may_jump and not admitted and all(quiet):
            steps = min(MOST_STEPS, *quiet, *(replica.until_end for replica in busy))
        largest = max(len(replica.running) for replica in busy)
        # The middle step takes the mean.
        contexts = [replica.context + (steps - 1) / 2 for replica in busy]
        milliseconds = 0.0
        for replica, context in zip(busy, contexts, strict=True):
            replica.step(steps)
            work = float(len(replica.running)), float(replica.num_tokens), context
            milliseconds = max(milliseconds, float(self._cost.step_ms(*work)[0]))
        self.clock += milliseconds * steps + self._admit_ms * admitted
        for replica, most in zip(busy, num_tokens_others(busy), strict=True):
            replica.end_step(milliseconds, steps == 1 and not admitted, most)
        counts = np.sum([replica.counts for replica in busy], axis=0).tolist()
        is_on = any(replica.switch_on for replica in busy)
        self.timeline.append((self.clock, steps, largest, is_on, *counts))
        return counts[-1]


def num_tokens_others(replicas: list[Replica]) -> list[int]:
    """For each rank the tokens of the largest last step of the others, 0 without others: all that vLLM's ranks know."""
    return [max((one.num_tokens for one in replicas if one is not rank), default=0) for rank in replicas]


def play(
    work: Round,
    cluster: Cluster,
    router: Assigned | Routed,
    cost: StepCost,
    parts: list[tuple[Policy, object]],
    progress: Callable[[int], object] | None = None,
) -> list[np.ndarray]:
    """Play a round to its end.

    Args:
        parts: policy and drafts of each replica.
        progress: called with the tokens generated since the last call.

    Returns:
        STEPS [rows] of each engine.

    Raises:
        RuntimeError: the router has left requests waiting.
    """
    generated, targets = np.zeros((2, len(work)), dtype=np.int64)
    replicas = [Replica(work, generated, targets, cluster.max_num_seqs, *part) for part in parts]
    ranks = [replicas] if cluster.dp_synchronous else [[replica] for replica in replicas]
    engines = [Engine(one, cost, cluster.admit_ms) for one in ranks]
    arriving = deque(np.argsort(work.arrivals, kind="stable").tolist())
    # The engine whose step ends first goes on first: a drafter that several share sees tokens in the order of time, and
    # a router knows what has ended. `idle` are those that no step ends of.
    ends: list[tuple[float, int]] = []
    idle = set(range(len(engines)))
    while ends or arriving:
        now = min(ends[0][0] if ends else np.inf, work.arrivals[arriving[0]] if arriving else np.inf)
        while arriving and work.arrivals[arriving[0]] <= now:
            router.arrive(arriving.popleft())
        if ends and ends[0][0] <= now:
            idle.add(ended := heapq.heappop(ends)[1])
            for replica in engines[ended].replicas:
                for request in replica.ended:
                    router.end(request, int(generated[request]))
                replica.ended.clear()
        for request, replica, target in router.decide(generated):
            targets[request] = target
            replicas[replica].queue.append(request)
        for i in sorted(i for i in idle if engines[i].has_work):
            engines[i].clock = max(engines[i].clock, now)
            emitted = engines[i].advance(may_jump=not arriving)
            idle.discard(i)
            heapq.heappush(ends, (engines[i].clock, i))
            if progress:
                progress(emitted)
    if (generated < work.lengths).any():
        raise RuntimeError(f"{(generated < work.lengths).sum()} requests were never finished: the router holds them")
    return [np.array(engine.timeline, STEPS) for engine in engines]
