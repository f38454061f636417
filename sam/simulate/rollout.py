"""Rollouts of one or several rounds under chosen settings, their results, and published set-ups to play.

The set-ups are cann-recipes-train's (llm_rl/qwen3, docs/llm_rl/sam_decoding.md): sizes, k and thresholds are known.
Their tables of step costs are fitted to published seconds, not measured; those named `cautious` cost in every context
what the published tails' 20,480 tokens do. Lengths are log-normal, as wide and as alike within a prompt as in
recordings of long chains of thought. docs/experiments/published_setups.md has how all that was found.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sam.config import SpeculationConfig
from sam.record.engine_steps import EngineSteps
from sam.simulate.acceptance import SHIPPED, Acceptance, DrawnDrafts, RealDrafts
from sam.simulate.engine import Assigned, Cluster, Routed, play
from sam.simulate.workload import Round
from sam.switch.policies import make_policy
from sam.switch.step_cost import StepCost

SCOPES, ROUTERS = ("request", "group", "shared"), ("verl", "context")
SIGMA, CORRELATION, CAP, PROMPT_TOKENS, SAMPLES = 0.6, 0.35, 34816, 128, 16


@dataclass(frozen=True)
class Choice:
    """The settings to choose for a rollout, as in configs/speculation/knobs.yaml.

    Attributes:
        policy: one of sam.config.POLICIES.
        k: draft tokens of a request.
        threshold: running requests, used by threshold.
        scope: one of SCOPES, whose text a drafter sees: the request's, also that of its prompt's other samples on the
            replica, or of all of them.
        router: one of ROUTERS, which says where requests run.
        chunk: tokens after which a response is routed anew, not with verl; 0: never.
        delay: tokens by which other replicas' text is late, with scope shared and drawn drafts.
    """

    policy: str = SpeculationConfig.policy
    k: int = SpeculationConfig.num_speculative_tokens
    threshold: int = SpeculationConfig.batch_size_threshold
    scope: str = SpeculationConfig.scope
    router: str = "verl"
    chunk: int = 0
    delay: int = 0

    @property
    def label(self) -> str:
        """Name in tables."""
        number = f" {self.threshold}" if self.policy == "threshold" else ""
        return f"{self.policy}{number}, k {self.k}" if self.policy != "never" else "off"


@dataclass(frozen=True)
class SetUp:
    """A published set-up."""

    cluster: Cluster
    prompts: int
    k: int
    threshold: int


SETUPS = {
    "qwen3_32b": SetUp(Cluster(replicas=4, max_num_seqs=128), 96, 3, 8),  # 32 dies, TP8
    "qwen3_32b_128die": SetUp(Cluster(replicas=16, max_num_seqs=256), 1536, 4, 4),  # TP8
    # 128 dies, TP4 EP128: 32 data-parallel ranks, synchronous.
    "qwen3_235b": SetUp(Cluster(replicas=32, max_num_seqs=64, dp_synchronous=True), 128, 3, 8),
}


def load_step_cost(name: str) -> StepCost:
    """Load a table from a file, or by the name of one that this package ships.

    Raises:
        ValueError: no such file or name, or not a table.
    """
    path, shipped = Path(name), SHIPPED / f"{name}.json"
    if path.suffix == ".json" or path.exists():
        return StepCost.load(path)
    if shipped.is_file():
        return StepCost.load(shipped)
    known = sorted(one.stem for one in SHIPPED.glob("*.json") if not one.stem.startswith("acceptance"))
    raise ValueError(f"step cost {name!r}: neither a file nor one of {', '.join(known)}")


# Makes the drafts of each replica, of a round, the settings, the replica of each request, their number, the round's.
Drafts = Callable[[Round, Choice, np.ndarray, int, int], list]


def drawn(table: Callable[[int], Acceptance]) -> Drafts:
    """Draw drafts from tables; `table` gives that of a draft length."""

    def make(work: Round, choice: Choice, replica_of: np.ndarray, replicas: int, number: int) -> list:
        prompts = np.arange(len(work)) if choice.scope == "request" else work.prompts
        count = 1 if choice.scope == "shared" else replicas
        one = table(choice.k), prompts, replica_of, choice.delay, number
        return [DrawnDrafts(*one) for _ in range(count)] * (replicas // count)

    return make


def real(make_drafter: Callable[[str, int], object]) -> Drafts:
    """Draft on the recorded responses; the drafters stay for all rounds. `make_drafter`: of scope and draft length."""
    drafters = []

    def make(work: Round, choice: Choice, replica_of: np.ndarray, replicas: int, number: int) -> list:
        count = 1 if choice.scope == "shared" else replicas
        if not number:
            scope = "request" if choice.scope == "request" else "group"
            drafters[:] = [make_drafter(scope, choice.k) for _ in range(count)]
        return [RealDrafts(drafter, work, number) for drafter in drafters] * (replicas // count)

    return make


def assign(requests: int, replicas: int, seed: int = 0) -> np.ndarray:
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
    progress: Callable[[int], object] | None = None,
) -> list[list[np.ndarray]]:
    """Play rounds one after the other; returns of each the timelines of its engines (sam.simulate.engine.STEPS)."""
    played = []
    for number, work in enumerate(rounds):
        replica_of = assign(len(work), cluster.replicas, seed=number)
        router = Assigned(work, replica_of) if choice.router == "verl" else Routed(work, cluster, choice.chunk)
        made = drafts(work, choice, replica_of, cluster.replicas, number)
        parts = [(make_policy(choice.policy, choice.k, choice.threshold, step_cost=cost), one) for one in made]
        played.append(play(work, cluster, router, cost, parts, progress))
    return played


def seconds(timelines: list[np.ndarray]) -> float:
    """Return the seconds of a round's slowest engine."""
    return max(float(timeline["end_ms"].max(initial=0.0)) for timeline in timelines) / 1e3


def summarize(played: list[list[np.ndarray]], tail_threshold: int) -> dict[str, float]:
    """Sum up what `simulate` returned, rounds one after the other.

    Args:
        tail_threshold: running requests at which the tail begins, with any policy.

    Returns:
        seconds: of the slowest engine of each round; tail_seconds: of these, those from when its running requests stay
        at or below the threshold; tokens: generated; engine_steps; switched_on: share of them that drafted; drafted,
        accepted: draft tokens; accept_length: accepted tokens and bonus token of a verified draft; wasted: draft tokens
        that were verified and not accepted.
    """
    steps = np.concatenate([timeline for timelines in played for timeline in timelines])
    drafted, accepted, verified = (int(steps[name].sum()) for name in ("drafted", "accepted", "verified"))
    slowest = (max(timelines, key=lambda one: one["end_ms"].max(initial=0.0)) for timelines in played)
    count = int(steps["steps"].sum())
    return {
        "seconds": sum(map(seconds, played)),
        "tail_seconds": sum(tail_seconds(timeline, tail_threshold) for timeline in slowest),
        "tokens": int(steps["emitted"].sum()),
        "engine_steps": count,
        "switched_on": int(steps["steps"][steps["switched_on"]].sum()) / max(1, count),
        "drafted": drafted,
        "accepted": accepted,
        "accept_length": 1.0 + accepted / max(1, verified),
        "wasted": drafted - accepted,
    }


def tail_seconds(timeline: np.ndarray, threshold: int) -> float:
    """Return the seconds of the steps in the tail, by the rule of recorded engine steps."""
    in_tail = EngineSteps(running=timeline["running"]).in_tail(threshold)
    return float(np.diff(timeline["end_ms"], prepend=0.0)[in_tail].sum() / 1e3)
