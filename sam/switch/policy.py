"""What a policy is shown and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

POLICIES = ("threshold", "goodput", "always", "never")


def check_turns(turns: Sequence[str]) -> None:
    """Raise ValueError unless each entry is a policy by name, a threshold with its requests behind it."""
    for turn in turns:
        name, _, requests = str(turn).partition(" ")
        if name not in POLICIES or (name == "threshold") != requests.isdigit() or (requests and name != "threshold"):
            raise ValueError(f"{turn!r}: expected never, always, goodput, or threshold and a number, as 'threshold 8'")


@dataclass(frozen=True)
class StepState:
    """The engine step that drafts would be verified in.

    Attributes:
        running: requests in the batch, decoding or still in their prompt.
        prefilling: those of them that are still in their prompt.
        waiting: requests that the engine has begun and holds back, as after a preemption.
        context: mean tokens of a running request; 0 if not known.
        rows_elsewhere: tokens of the fullest other data-parallel rank, drafts among them, which all ranks wait for: in
            the step before, or in `observe` in the step itself. 0 where none is known to have more than this rank.
        steps: since the policy was last asked, this one included.
    """

    running: int
    prefilling: int = 0
    waiting: int = 0
    context: float = 0.0
    rows_elsewhere: int = 0
    steps: int = 1


@dataclass(frozen=True)
class Plan:
    """What may be drafted.

    Attributes:
        budget: draft tokens of a request; 0 switches speculation off.
        min_acceptance: probability of being accepted below which a draft token cannot pay.
        hold: further steps in which the answer is the same while as many requests run: no need to ask.
    """

    budget: int
    min_acceptance: float = 0.0
    hold: int = 0


class Policy(Protocol):
    """Attributes:
    counters: what it counts goes here, and from here into the metrics.
    """

    counters: dict[str, int]

    def plan(self, state: StepState) -> Plan: ...

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """How many tokens of each draft to verify; asked only after a plan with a budget.

        Args:
            acceptance: float32 [total], cumulative acceptance probabilities, falling within each draft.
            offsets: int64 [drafts + 1], where each begins.

        Returns:
            int64 [drafts].
        """
        ...

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """What the step of `state` came to: draft tokens verified, those accepted, and its time."""
        ...
