"""When to speculate, and how far: policies that give every engine step its drafts.

Verifying k+1 tokens costs what one token costs only while decoding is bound by memory, that is while few requests run.
A policy is asked twice in a step: `plan` says before drafting how many tokens a request may draft, `choose` says
afterwards how many of each draft are verified. `observe` tells it what the step took. Whatever is not verified costs
no accelerator time. Policies follow from what they are shown alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sam.switch.goodput import Goodput
from sam.switch.policy import POLICIES, Plan, Policy, StepState
from sam.switch.step_cost import StepCost

NO_THRESHOLD = 1 << 30


class Threshold:
    """Speculate while at most `batch_size_threshold` requests run (the published recipe's switch).

    Args:
        hysteresis: once on, it goes off only above batch_size_threshold + hysteresis, so that requests that come and
            go do not make it flap.
    """

    def __init__(self, num_speculative_tokens: int, batch_size_threshold: int, hysteresis: int = 0):
        self.num_speculative_tokens, self.batch_size_threshold = num_speculative_tokens, batch_size_threshold
        self.hysteresis = hysteresis
        self.counters: dict[str, int] = {}
        self._on = False

    def plan(self, state: StepState) -> Plan:
        self._on = state.running <= self.batch_size_threshold + (self.hysteresis if self._on else 0)
        return Plan(self.num_speculative_tokens if self._on else 0, hold=0 if self._on else NO_THRESHOLD)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return np.diff(offsets)

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        pass


class InTurns:
    """Policies that take turns, for comparing them in one process: each has the rollouts of one version of the weights.

    Counts whose turn it is as `turn`, an index into `policies`.
    """

    def __init__(self, policies: Sequence[Policy]):
        self.policies = list(policies)
        self.counters = {}
        self.start_turn(0)

    @property
    def counters(self) -> dict[str, int]:
        return self._counters

    @counters.setter
    def counters(self, counters: dict[str, int]) -> None:
        self._counters = counters
        for policy in self.policies:
            policy.counters = counters

    @property
    def has_table(self) -> bool:
        return all(getattr(policy, "has_table", True) for policy in self.policies)

    def use_table(self, step_cost: StepCost, forward_only: bool = False) -> None:
        for policy in self.policies:
            if hasattr(policy, "use_table"):
                policy.use_table(step_cost, forward_only)

    def start_turn(self, number: int) -> None:
        """Let the policy of turn `number` decide from now on; the first follows the last."""
        self.counters["turn"] = number % len(self.policies)
        now = self.policies[self.counters["turn"]]
        self.plan, self.choose, self.observe = now.plan, now.choose, now.observe


def make_policy(
    name: str,
    num_speculative_tokens: int,
    batch_size_threshold: int,
    hysteresis: int = 0,
    step_cost: StepCost | None = None,
    graph_sizes: tuple[int, ...] = (),
) -> Policy:
    """Build a policy by name.

    Args:
        step_cost: of goodput; without one it starts from what it observes itself.
        graph_sizes: tokens of the captured graphs, to which goodput fits its steps.

    Raises:
        ValueError: unknown name, fewer than one draft token, or a negative threshold or hysteresis.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: expected at least 1")
    for key, value in (
        ("batch_size_threshold", batch_size_threshold),
        ("hysteresis", hysteresis),
    ):
        if value < 0:
            raise ValueError(f"{key}={value}: expected 0 or more")
    if name == "goodput":
        return Goodput(num_speculative_tokens, step_cost, graph_sizes)
    thresholds = {"threshold": batch_size_threshold, "always": NO_THRESHOLD, "never": -1}
    if name not in thresholds:
        raise ValueError(f"speculation policy {name!r} is unknown: expected one of {', '.join(POLICIES)}")
    return Threshold(num_speculative_tokens, thresholds[name], hysteresis if name == "threshold" else 0)
