"""Rollouts of one or several rounds with a policy, and their results."""

from collections.abc import Callable
from dataclasses import asdict, dataclass

import numpy as np

from sam.config import SpeculationConfig
from sam.record.engine_steps import EngineSteps
from sam.simulate.acceptance import Acceptance
from sam.simulate.drafting import Drafting, DrawnDrafts, GroupDrafts, RealDrafts
from sam.simulate.engine import Cluster, Played, play
from sam.simulate.lengths import Round
from sam.simulate.routing import Assigned, Routed, Router, assign
from sam.switch.policies import make_policy
from sam.switch.policy import Policy
from sam.switch.step_cost import StepCost


@dataclass(frozen=True)
class Choice:
    """The settings to choose for a rollout, as in configs/speculation/knobs.yaml.

    Attributes:
        policy: one of sam.switch.policy.POLICIES.
        k: draft tokens of a request.
        threshold, hysteresis: running requests, used by threshold.
        scope: request or group, whose text a drafter sees.
        routing: one of sam.simulate.routing.ROUTINGS.
        router: one of sam.simulate.routing.ROUTERS; other than verl, it decides where requests run, and `routing` says
            only whose text a drafter sees.
        chunk: tokens after which a response is routed anew, not with verl; 0: never.
    """

    policy: str = SpeculationConfig.policy
    k: int = SpeculationConfig.num_speculative_tokens
    threshold: int = SpeculationConfig.batch_size_threshold
    hysteresis: int = SpeculationConfig.hysteresis
    scope: str = SpeculationConfig.scope
    routing: str = "least-loaded"
    router: str = "verl"
    chunk: int = 0

    def make_router(self, work: Round, cluster: Cluster, replica_of: np.ndarray) -> Router:
        if self.router == "verl":
            return Assigned(work, replica_of)
        sizes = cluster.replicas, cluster.max_num_seqs, cluster.kv_tokens
        return Routed(work, *sizes, self.chunk)

    def make_policy(self, cost: StepCost) -> Policy:
        return make_policy(self.policy, self.k, self.threshold, hysteresis=self.hysteresis, step_cost=cost)

    @property
    def label(self) -> str:
        """Name in tables."""
        number = f" {self.threshold}" if self.policy == "threshold" else ""
        return f"{self.policy}{number}, k {self.k}" if self.policy != "never" else "off"


@dataclass(frozen=True)
class Drawn:
    """Draws acceptance from tables; `table` gives that of a draft length."""

    table: Callable[[int], Acceptance]

    def __call__(
        self, work: Round, choice: Choice, replica_of: np.ndarray, replicas: int, number: int
    ) -> list[Drafting]:
        """The drafting of each replica in round `number`; `replica_of` (int64 [requests]) is each request's."""
        table = self.table(choice.k)
        if choice.scope == "request":
            return [DrawnDrafts(table, np.zeros(len(work), np.int64), number)] * replicas
        shared = choice.routing == "shared"
        drafts = [GroupDrafts(table, work.prompts, number) for _ in range(1 if shared else replicas)]
        return drafts * (replicas if shared else 1)


class Real:
    """Drafts on the recorded responses; the drafters stay for all rounds. `make_drafter`: of scope and draft length."""

    def __init__(self, make_drafter: Callable[[str, int], object]):
        self._make, self._drafters = make_drafter, []

    def __call__(
        self, work: Round, choice: Choice, replica_of: np.ndarray, replicas: int, number: int
    ) -> list[Drafting]:
        """As `Drawn`; the first round begins with new drafters, one for all replicas with shared routing."""
        shared = choice.routing == "shared"
        if not number:
            self._drafters = [self._make(choice.scope, choice.k) for _ in range(1 if shared else replicas)]
        return [RealDrafts(drafter, work, number) for drafter in self._drafters] * (replicas if shared else 1)


@dataclass(frozen=True)
class Outcome:
    """A rollout's results, summed over its rounds, which run one after the other.

    Attributes:
        seconds: seconds of the slowest engine.
        mean_seconds: mean seconds of all engines.
        tail_seconds: seconds of the slowest engine from when its running requests stay at or below the threshold.
        last_tenth_seconds: seconds after nine tenths of the responses were complete.
        tokens: generated tokens.
        engine_steps: steps of all engines.
        switched_on: share of the engine steps that drafted.
        drafted, accepted: draft tokens verified, and those accepted.
        accept_length: mean accepted tokens and bonus token of a verified draft.
        wasted: draft tokens that were verified and not accepted.
        preempted: requests that a full KV cache turned out.
        read_again: tokens of context read a second time, after preemptions and moves.
        moves: chunks that went on at another replica.
    """

    seconds: float
    mean_seconds: float
    tail_seconds: float
    tokens: int
    engine_steps: int
    switched_on: float
    drafted: int
    accepted: int
    accept_length: float
    wasted: int
    preempted: int = 0
    read_again: int = 0
    moves: int = 0
    last_tenth_seconds: float = 0.0

    def rounded(self) -> dict:
        """The fields, floats rounded to four digits."""
        return {key: round(value, 4) if isinstance(value, float) else value for key, value in asdict(self).items()}


def simulate(
    rounds: list[Round],
    cluster: Cluster,
    choice: Choice,
    cost: StepCost,
    acceptance: Drawn | Real,
    tail_threshold: int,
    progress: Callable[[int], object] | None = None,
) -> tuple[Outcome, list[Played]]:
    """Play rounds one after the other.

    Args:
        tail_threshold: running requests at which the tail begins, with any policy.
    """
    played = []
    for number, work in enumerate(rounds):
        replica_of = assign(work.prompts, cluster.replicas, choice.routing, seed=number)
        drafting = acceptance(work, choice, replica_of, cluster.replicas, number)
        policies = [choice.make_policy(cost) for _ in drafting]
        router = choice.make_router(work, cluster, replica_of)
        played.append(play(work, cluster, router, cost, policies, drafting, progress))
    return summarize(played, tail_threshold), played


def summarize(played: list[Played], tail_threshold: int) -> Outcome:
    def total(name: str) -> int:
        return int(sum(timeline[name].sum() for one in played for timeline in one.timelines))

    steps = total("steps")
    on = sum(t["steps"][t["switched_on"]].sum() for one in played for t in one.timelines)
    drafted, accepted, verified = total("drafted"), total("accepted"), total("verified")
    return Outcome(
        seconds=float(sum(one.seconds.max() for one in played)),
        mean_seconds=float(sum(one.seconds.mean() for one in played)),
        tail_seconds=float(sum(tail_seconds(slowest(one), tail_threshold) for one in played)),
        tokens=total("emitted"),
        engine_steps=steps,
        switched_on=float(on / max(1, steps)),
        drafted=drafted,
        accepted=accepted,
        accept_length=1.0 + accepted / verified if verified else 1.0,
        wasted=drafted - accepted,
        **{name: sum(one.counts[name] for one in played) for name in ("preempted", "read_again", "moves")},
        last_tenth_seconds=float(sum(one.last_tenth_seconds for one in played)),
    )


def slowest(played: Played) -> np.ndarray:
    return played.timelines[int(np.argmax(played.seconds))]


def tail_seconds(timeline: np.ndarray, threshold: int) -> float:
    """Seconds of the steps in the tail, by the rule of recorded engine steps."""
    in_tail = EngineSteps(running=timeline["running"]).in_tail(threshold)
    return float(np.diff(timeline["end_ms"], prepend=0.0)[in_tail].sum() / 1e3)
