"""Rollouts played event by event under chosen settings: queued, drafted, verified, to the last token.

The published set-ups are cann-recipes-train's (llm_rl/qwen3, docs/llm_rl/sam_decoding.md): sizes, k and thresholds are
known. Their tables of step costs are fitted to published seconds, not measured; those named `cautious` cost in every
context what the published tails' 20,480 tokens do. Lengths are log-normal, as wide and as alike within a prompt as in
recordings of long chains of thought.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.reading import json_object
from sam.switch.policies import Plan, Policy, make_policy
from sam.switch.step_cost import StepCost, StepState
from sam.tools.simulate.workload import SHIPPED, Acceptance, DrawnDrafts, RealDrafts, Round, log_normal

SCOPES = "request", "group", "shared"
SIGMA = 0.6
CORRELATION = 0.35
CAP = 34816
SAMPLES = 16
SETUPS = sorted(path.stem for path in SHIPPED.glob("qwen*.json"))
# A step with drafts, or a series of steps without: when it ended, how many steps, requests of the largest replica,
# whether any speculated, draft tokens, those accepted, requests that had any, and tokens generated.
COUNTS = ("drafted", "accepted", "verified", "emitted")
STEPS = np.dtype(
    [
        ("end_ms", "f8"),
        ("steps", "i8"),
        ("running", "i8"),
        ("switched_on", "?"),
        *((name, "i8") for name in COUNTS),
    ]
)
MOST_STEPS = 64  # without drafts that are played at once: costs are all but linear in so few tokens of context


@dataclass(frozen=True)
class Choice:
    """What to choose for a rollout: policy, draft tokens and threshold as in sam/configs/speculation/knobs.yaml.

    Attributes:
        scope: one of SCOPES, whose text a drafter sees: the request's, also that of its prompt's other samples on the
            replica, or of all of them.
    """

    policy: str = SpeculationConfig.policy
    k: int = SpeculationConfig.num_speculative_tokens
    threshold: int = SpeculationConfig.batch_size_threshold
    scope: str = SpeculationConfig.scope

    @property
    def label(self) -> str:
        """Name in tables."""
        if self.policy == "never":
            return "off"
        if self.policy == "threshold":
            return f"threshold {self.threshold}, k {self.k}"
        return f"{self.policy}, k {self.k}"


@dataclass(frozen=True)
class Cluster:
    """The machines that a rollout runs on.

    Attributes:
        max_num_seqs: requests that run at once on a replica; the others wait, first come first served.
        dp_synchronous: whether the replicas are data-parallel ranks of one engine, in which every step waits for the
            slowest rank; otherwise each runs on its own.
        admit_ms: milliseconds that a new request adds to its first step, in which its prompt is read.
    """

    replicas: int = 1
    max_num_seqs: int = 128
    dp_synchronous: bool = False
    admit_ms: float = 0.0


class Setup(NamedTuple):
    """A published set-up: its machines, a round of its requests, step costs, draft tokens and threshold."""

    cluster: Cluster
    work: Round
    cost: StepCost
    k: int
    threshold: int


def load_setup(name: str, prompts: int | None = None) -> Setup:
    """One of SETUPS, with as many prompts in a round; None: as published."""
    path = SHIPPED / f"{name}.json"
    setup = json_object(path)["setup"]
    shape = prompts or setup["prompts"], SAMPLES
    return Setup(
        cluster=Cluster(**setup["cluster"]),
        work=log_normal(setup["median_response_tokens"], CAP, SIGMA, CORRELATION, shape),
        cost=StepCost.load(path),
        k=setup["k"],
        threshold=setup["threshold"],
    )


class SimulatedReplica:
    """One data-parallel rank of an engine, or a whole engine: its queue, its batch, its policy and its drafts.

    Args:
        generated: int64 [requests of the round], shared by all replicas: tokens that each has.

    Attributes:
        running: int64 [n], requests in the batch, in the order in which they came.
        counts, num_tokens: COUNTS of the last step, and its tokens, drafts included.
    """

    def __init__(self, work: Round, generated: np.ndarray, slots: int, policy: Policy, drafts):
        self._work = work
        self._generated = generated
        self._slots = slots
        self._policy = policy
        self._drafts = drafts
        self.queue = deque()
        self.running = np.empty(0, np.int64)
        self._fresh = self.num_tokens = 0  # requests that came with this step
        self.counts = (0, 0, 0, 0)
        self.switch_on = False
        self._state = StepState(0)
        self._plan = Plan(0)
        self._steps = 0  # since the plan was made

    def admit(self) -> int:
        """Take requests into the batch while there are slots; returns their number."""
        new = [self.queue.popleft() for _ in range(min(len(self.queue), self._slots - len(self.running)))]
        for request in new:
            self._drafts.start(request)
        self.running = np.append(self.running, new).astype(np.int64)
        self._fresh = len(new)
        return len(new)

    def plan(self, num_tokens_other: int) -> int:
        """Ask the policy for a plan unless its last one is valid; returns the steps that are sure to have no drafts.
        `num_tokens_other`: of the largest batch of the other ranks in the step before."""
        if len(self.running) != self._state.running or self._steps > self._plan.valid_for_steps:
            context = float((self._work.prompt_tokens[self.running] + self._generated[self.running]).mean())
            self._state = StepState(len(self.running), self._fresh, context, num_tokens_other, max(1, self._steps))
            self._plan = self._policy.plan(self._state)
            self._steps = 0
        return 0 if self._plan.budget else 1 + self._plan.valid_for_steps - self._steps

    def until_end(self) -> int:
        """Tokens until the first running request ends."""
        return int((self._work.lengths[self.running] - self._generated[self.running]).min())

    def step(self, cost: StepCost, steps: int) -> float:
        """Draft, verify and advance by a step, or by `steps` steps without drafts; returns the milliseconds of each for
        this rank alone."""
        running = self.running
        before = self._generated[running]
        context = float((self._work.prompt_tokens[running] + before).mean()) + (steps - 1) / 2  # of the middle step
        tokens = np.full(len(running), steps)
        counts = (0, 0, 0)
        self.switch_on = False
        if self._plan.budget and self._fresh < len(running):
            budgets = np.where(before > 0, self._plan.budget, 0)
            acceptance, offsets = self._drafts.draft(running, before, budgets, self._plan.min_acceptance)
            lengths = self._policy.choose(self._state, acceptance, offsets)
            left = self._work.lengths[running] - before
            accepted = np.minimum(self._drafts.verify(lengths), left)
            tokens = np.minimum(accepted + 1, left)
            counts = int(lengths.sum()), int(accepted.sum()), int(np.count_nonzero(lengths))
            self.switch_on = counts[0] > 0 or not len(acceptance)
        self._generated[running] += tokens
        self.counts = (*counts, int(tokens.sum()))
        self.num_tokens = len(running) + counts[0]
        self._steps += steps
        return float(cost.step_ms(float(len(running)), float(self.num_tokens), context)[0])

    def end_step(self, milliseconds: float, is_observed: bool, num_tokens_other: int) -> None:
        """Show the step's tokens to the drafter and its time to the policy, with the tokens of the other ranks' largest
        batch in it, and let go of what has ended."""
        running = self.running
        generated = self._generated[running]
        self._drafts.append(running, generated)
        if is_observed and not self._plan.valid_for_steps:
            state = replace(self._state, max_num_tokens_other_dp_ranks=num_tokens_other)
            self._policy.observe(state, *self.counts[:2], milliseconds)
        is_ended = generated >= self._work.lengths[running]
        if is_ended.any():
            self.running = running[~is_ended]
            for request in running[is_ended].tolist():
                self._drafts.finish(request)


class Engine:
    """Replicas that step together: one, or all ranks of a data-parallel synchronous cluster.

    Attributes:
        clock, timeline: milliseconds since the round began, and rows of STEPS.
    """

    def __init__(self, replicas: list[SimulatedReplica], cost: StepCost, admit_ms: float):
        self.replicas = replicas
        self._cost = cost
        self._admit_ms = admit_ms
        self.clock = 0.0
        self.timeline = []

    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return any(len(replica.running) or replica.queue for replica in self.replicas)

    def advance(self, may_jump: bool) -> int:
        """Play one step or, if it may jump, all steps without drafts until something changes; returns the tokens."""
        admitted = sum(replica.admit() for replica in self.replicas)
        busy = [replica for replica in self.replicas if len(replica.running)]
        quiet = [rank.plan(most) for rank, most in zip(busy, num_tokens_others(busy), strict=True)]
        steps = 1
        if may_jump and not admitted and all(quiet):
            steps = min(MOST_STEPS, *quiet, *(replica.until_end() for replica in busy))
        largest = max(len(replica.running) for replica in busy)
        milliseconds = max(replica.step(self._cost, steps) for replica in busy)
        self.clock += milliseconds * steps + self._admit_ms * admitted
        for replica, most in zip(busy, num_tokens_others(busy), strict=True):
            replica.end_step(milliseconds, steps == 1 and not admitted, most)
        counts = np.sum([replica.counts for replica in busy], axis=0).tolist()
        self.timeline.append((self.clock, steps, largest, any(replica.switch_on for replica in busy), *counts))
        return counts[-1]


def num_tokens_others(replicas: list[SimulatedReplica]) -> list[int]:
    """For each rank the tokens of the largest last step of the others, 0 without others: all that vLLM's ranks know."""
    return [max((other.num_tokens for other in replicas if other is not rank), default=0) for rank in replicas]


def play(work: Round, cluster: Cluster, replica_of: np.ndarray, cost: StepCost, parts, progress) -> list[np.ndarray]:
    """Play a round to its end; returns STEPS [rows] of each engine.

    Args:
        replica_of: int64 [requests], where each runs.
        parts: list of (Policy, drafts), of each replica.
        progress: called with the tokens generated since the last call.
    """
    generated = np.zeros(len(work), dtype=np.int64)
    replicas = [SimulatedReplica(work, generated, cluster.max_num_seqs, *part) for part in parts]
    ranks = [replicas] if cluster.dp_synchronous else [[replica] for replica in replicas]
    engines = [Engine(together, cost, cluster.admit_ms) for together in ranks]
    arriving = deque(np.argsort(work.arrivals, kind="stable").tolist())
    # The engine whose step ends first goes on first: a drafter that several share sees tokens in the order of time.
    # `idle` are those that no step ends of.
    ends: list[tuple[float, int]] = []
    idle = set(range(len(engines)))
    while ends or arriving:
        now = min(ends[0][0] if ends else np.inf, work.arrivals[arriving[0]] if arriving else np.inf)
        while arriving and work.arrivals[arriving[0]] <= now:
            request = arriving.popleft()
            replicas[replica_of[request]].queue.append(request)
        if ends and ends[0][0] <= now:
            idle.add(heapq.heappop(ends)[1])
        for i in sorted(i for i in idle if engines[i].has_work()):
            engines[i].clock = max(engines[i].clock, now)
            progress(engines[i].advance(may_jump=not arriving))
            idle.discard(i)
            heapq.heappush(ends, (engines[i].clock, i))
    return [np.array(engine.timeline, STEPS) for engine in engines]


# Makes the drafts of a drafter: of a round, the settings, the drafter's number and the round's.
Drafts = Callable[[Round, Choice, int, int], object]


def drawn(table: Callable[[int], Acceptance]) -> Drafts:
    """Draw drafts from tables; `table` gives that of a draft length."""

    def make(work: Round, choice: Choice, which: int, number: int) -> DrawnDrafts:
        groups = np.arange(len(work)) if choice.scope == "request" else work.prompts
        return DrawnDrafts(table(choice.k), groups, number)

    return make


def real() -> Drafts:
    """Draft with sam on the recorded responses; the drafters stay for all rounds."""
    drafters = {}

    def make(work: Round, choice: Choice, which: int, number: int) -> RealDrafts:
        if not number:
            scope = "request" if choice.scope == "request" else "group"
            drafters[which] = Drafter(max_draft_tokens=choice.k, scope=scope)
        return RealDrafts(drafters[which], work, number)

    return make


def assign(requests: int, replicas: int, seed: int) -> np.ndarray:
    """Assign requests that arrive together: each to the replica with the fewest, a random one of them if there are
    several, as verl 0.9.1's GlobalRequestLoadBalancer does; returns int64 [requests]."""
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(replicas) for _ in range(-(-requests // replicas))])[:requests]


def simulate(
    rounds: list[Round],
    cluster: Cluster,
    choice: Choice,
    cost: StepCost,
    drafts: Drafts,
    progress: Callable[[int], object] = lambda tokens: None,
) -> list[list[np.ndarray]]:
    """Play rounds one after the other; returns of each the timelines of its engines, STEPS [rows]."""
    played = []
    count = 1 if choice.scope == "shared" else cluster.replicas
    for number, work in enumerate(rounds):
        replica_of = assign(len(work), cluster.replicas, seed=number)
        made = [drafts(work, choice, which, number) for which in range(count)] * (cluster.replicas // count)
        parts = [(make_policy(choice.policy, choice.k, choice.threshold, step_cost=cost), own) for own in made]
        played.append(play(work, cluster, replica_of, cost, parts, progress))
    return played


def seconds(timelines: list[np.ndarray]) -> float:
    """Return the seconds of a round's slowest engine."""
    return max(float(timeline["end_ms"].max(initial=0.0)) for timeline in timelines) / 1e3


def summarize(played: list[list[np.ndarray]]) -> dict[str, float]:
    """Sum up what `simulate` returned, rounds one after the other.

    Returns:
        seconds: of the slowest engine of each round; tokens: generated; engine_steps; switched_on: share of them that
        drafted; drafted, accepted: draft tokens; accept_length: accepted tokens and bonus token of a verified draft;
        wasted: draft tokens that were verified and not accepted.
    """
    steps = np.concatenate([timeline for timelines in played for timeline in timelines])
    drafted, accepted, verified, emitted = (int(steps[name].sum()) for name in COUNTS)
    count = int(steps["steps"].sum())
    return {
        "seconds": sum(map(seconds, played)),
        "tokens": emitted,
        "engine_steps": count,
        "switched_on": int(steps["steps"][steps["switched_on"]].sum()) / max(1, count),
        "drafted": drafted,
        "accepted": accepted,
        "accept_length": 1.0 + accepted / max(1, verified),
        "wasted": drafted - accepted,
    }
