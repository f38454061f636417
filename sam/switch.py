"""When to speculate: policies that give every engine step its draft budget.

Verifying k+1 tokens costs what one token costs only while decoding is bound by memory, that is while few
requests run. A policy sees the step about to be drafted for and says how many tokens each request may draft.
Policies are deterministic functions of what they are shown, so all tensor-parallel ranks decide alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class StepState:
    """The engine step that drafts would be verified in.

    Attributes:
        running: requests in the batch, in tokens-per-step decode or still in their prompt.
        prefilling: those of them that are still in their prompt.
    """

    running: int
    prefilling: int = 0


class Policy(Protocol):
    def draft_budget(self, state: StepState) -> int:
        """Draft tokens per request for the next step; 0 switches speculation off."""
        ...

    def min_survival(self, state: StepState) -> float:
        """Probability of being accepted below which a draft token costs more than it brings."""
        ...


def break_even_survival(rows: int, fixed_cost_rows: int) -> float:
    """The survival at which verifying one more draft token neither costs nor brings time.

    With a step time of b x (fixed_cost_rows + rows), a token takes b x (fixed_cost_rows + rows) / rows, and one more
    row costs b: a draft token pays when it is accepted more often than rows / (rows + fixed_cost_rows).

    Args:
        rows: tokens that the step verifies without drafts: its requests.
        fixed_cost_rows: rows at which a step takes twice as long as an empty one; 0 for no limit.
    """
    return rows / (rows + fixed_cost_rows) if fixed_cost_rows else 0.0


@dataclass(frozen=True)
class Threshold:
    """Speculate while at most `batch_size_threshold` requests run (the published recipe's switch)."""

    num_speculative_tokens: int
    batch_size_threshold: int
    fixed_cost_rows: int = 0

    def draft_budget(self, state: StepState) -> int:
        return self.num_speculative_tokens if state.running <= self.batch_size_threshold else 0

    def min_survival(self, state: StepState) -> float:
        return break_even_survival(state.running, self.fixed_cost_rows)


POLICIES = ("threshold", "always", "never")
NO_THRESHOLD = 1 << 30


def make_policy(name: str, num_speculative_tokens: int, batch_size_threshold: int, fixed_cost_rows: int = 0) -> Policy:
    """Build a policy by name.

    Raises:
        ValueError: unknown name, fewer than one draft token, or a negative threshold or cost.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: expected at least 1")
    if batch_size_threshold < 0:
        raise ValueError(f"batch_size_threshold={batch_size_threshold}: expected 0 or more")
    if fixed_cost_rows < 0:
        raise ValueError(f"fixed_cost_rows={fixed_cost_rows}: expected 0 or more")
    thresholds = {"threshold": batch_size_threshold, "always": NO_THRESHOLD, "never": -1}
    if name not in thresholds:
        raise ValueError(f"speculation policy {name!r} is unknown: expected one of {', '.join(POLICIES)}")
    return Threshold(num_speculative_tokens, thresholds[name], fixed_cost_rows)
