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


@dataclass(frozen=True)
class Always:
    num_speculative_tokens: int

    def draft_budget(self, state: StepState) -> int:
        return self.num_speculative_tokens


@dataclass(frozen=True)
class Never:
    def draft_budget(self, state: StepState) -> int:
        return 0


@dataclass(frozen=True)
class Threshold:
    """Speculate while at most `batch_size_threshold` requests run (the published recipe's switch)."""

    num_speculative_tokens: int
    batch_size_threshold: int

    def draft_budget(self, state: StepState) -> int:
        return self.num_speculative_tokens if state.running <= self.batch_size_threshold else 0


POLICIES = ("threshold", "always", "never")


def make_policy(name: str, num_speculative_tokens: int, batch_size_threshold: int) -> Policy:
    """Build a policy by name.

    Raises:
        ValueError: unknown name, fewer than one draft token, or a negative threshold.
    """
    if num_speculative_tokens < 1:
        raise ValueError(f"num_speculative_tokens={num_speculative_tokens}: expected at least 1")
    if batch_size_threshold < 0:
        raise ValueError(f"batch_size_threshold={batch_size_threshold}: expected 0 or more")
    if name == "threshold":
        return Threshold(num_speculative_tokens, batch_size_threshold)
    if name == "always":
        return Always(num_speculative_tokens)
    if name == "never":
        return Never()
    raise ValueError(f"speculation policy {name!r} is unknown: expected one of {', '.join(POLICIES)}")
