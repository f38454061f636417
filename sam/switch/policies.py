"""Policies: when an engine step speculates, and how many draft tokens it verifies.

Verifying k + 1 tokens costs as much as one token only while decoding is bound by memory bandwidth, that is while few
requests run. In each step a policy is called before drafting (`plan`: how many tokens a request may draft), after it
(`choose`: how many tokens of each draft are verified) and when the step is over (`observe`: how long it took). Draft
tokens that are not verified cost no accelerator time. A decision depends on the arguments of these calls alone.
"""

import numpy as np

from sam.config import POLICIES
from sam.switch.goodput import Goodput
from sam.switch.policy import Plan, Policy, StepState
from sam.switch.step_cost import StepCost

NO_THRESHOLD = 1 << 30


class Threshold:
    """Speculate while at most `batch_size_threshold` requests run, as the published recipe does, or are about to.

    Args:
        num_speculative_tokens: draft tokens of a request.
        batch_size_threshold: running requests.
        hysteresis: running requests above the threshold at which speculation, once on, still stays on: requests that
            come and go do not make it flap.

    Attributes:
        counters: awaited_steps, in which only requests that were about to come kept it off.
    """

    def __init__(self, num_speculative_tokens: int, batch_size_threshold: int, hysteresis: int = 0):
        self.num_speculative_tokens, self.batch_size_threshold = num_speculative_tokens, batch_size_threshold
        self.hysteresis = hysteresis
        self.counters: dict[str, int] = {}
        self._on = False

    def plan(self, state: StepState) -> Plan:
        """Compare the requests that run, and those that are about to, with the threshold."""
        most = self.batch_size_threshold + (self.hysteresis if self._on else 0)
        self._on = state.running + state.awaited <= most
        if self._on:
            return Plan(self.num_speculative_tokens)
        if state.running > most:
            return Plan(0, valid_for_steps=NO_THRESHOLD)
        self.counters["awaited_steps"] = self.counters.get("awaited_steps", 0) + 1
        return Plan(0)

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Verify whole drafts."""
        return np.diff(offsets)

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Verify all paths, whole."""
        return np.diff(offsets)

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Learn nothing: a threshold is fixed."""


def make_policy(
    name: str,
    num_speculative_tokens: int,
    batch_size_threshold: int,
    hysteresis: int = 0,
    step_cost: StepCost | None = None,
    graph_sizes: tuple[int, ...] = (),
    uniform: bool = False,
    paths: int = 1,
) -> Policy:
    """Build a policy by its name, one of POLICIES.

    Args:
        num_speculative_tokens: draft tokens of a request, at least 1.
        batch_size_threshold: running requests, used by threshold.
        hysteresis: running requests, used by threshold.
        step_cost: used by goodput, which without a table learns step costs from the steps that it observes.
        graph_sizes: tokens of the captured graphs, which goodput fills up.
        uniform: whether a step with any draft tokens verifies `num_speculative_tokens` of every request.
        paths: of a request at most; goodput chooses among the further ones, others verify all.

    Raises:
        ValueError: unknown name, fewer than one draft token, or a negative threshold or hysteresis.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: expected at least 1")
    for key, value in {"batch_size_threshold": batch_size_threshold, "hysteresis": hysteresis}.items():
        if value < 0:
            raise ValueError(f"{key}={value}: expected 0 or more")
    if name == "goodput":
        return Goodput(num_speculative_tokens, step_cost, graph_sizes, uniform, paths)
    thresholds = {"threshold": batch_size_threshold, "always": NO_THRESHOLD, "never": -1}
    if name not in thresholds:
        raise ValueError(f"speculation policy {name!r} is unknown: expected one of {', '.join(POLICIES)}")
    return Threshold(num_speculative_tokens, thresholds[name], hysteresis if name == "threshold" else 0)
