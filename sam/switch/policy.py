"""The interface between an engine and a policy, whose decisions depend on the arguments of these calls alone."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class StepState:
    """The engine step in which drafts would be verified.

    Attributes:
        running: int, requests in the batch, decoding or prefilling.
        prefilling: int, of these, those whose prompt has not been read to its end.
        context: float, mean tokens of a running request, prompt and response; 0.0 if unknown.
        max_num_tokens_other_dp_ranks: int, tokens of the largest batch among the other data-parallel ranks, draft
            tokens included; all ranks wait for it. `plan` and `choose` are given that of the previous step, `observe`
            that of the step itself. 0 if no other rank is known to have more than this one.
        steps_since_plan: int, engine steps since the last call of `plan`, this one included.
    """

    running: int
    prefilling: int = 0
    context: float = 0.0
    max_num_tokens_other_dp_ranks: int = 0
    steps_since_plan: int = 1


@dataclass(frozen=True)
class Plan:
    """The drafts that a policy asks for in a step.

    Attributes:
        budget: int, draft tokens per request; 0 switches speculation off.
        min_acceptance: float in [0, 1], probability of being accepted below which a draft token cannot pay.
        valid_for_steps: int, further steps in which the plan stays the same while `running` stays the same: until then
            the policy need not be asked.
    """

    budget: int
    min_acceptance: float = 0.0
    valid_for_steps: int = 0


class Policy:
    """Decides in every engine step how many draft tokens are verified: here all that `plan` asks for."""

    def __init__(self):
        self.counters: dict[str, int] = {}  # which the metrics report

    def plan(self, state: StepState) -> Plan:
        """Say before drafting which drafts the step can use."""
        raise NotImplementedError

    def choose(self, state: StepState, acceptance: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        """Say after drafting how many tokens of each draft to verify; called only if the plan has a budget.

        Args:
            acceptance: float32 [total], the draft tokens' probabilities of being accepted, falling within each draft.
            offsets: int64 [drafts + 1], where each draft begins.

        Returns:
            int64 [drafts], tokens of each.
        """
        return np.diff(offsets)

    def choose_paths(
        self, state: StepState, drafted: int, acceptance: np.ndarray, offsets: np.ndarray, overhead: np.ndarray
    ) -> np.ndarray:
        """Say after `choose`, which chose `drafted` draft tokens, how many own tokens of further paths to verify.

        `overhead`: int64 [paths], tokens that verifying a path costs beside its own.
        """
        return np.diff(offsets)

    def observe(self, state: StepState, drafted: int, accepted: int, milliseconds: float) -> None:
        """Learn from the finished step of `state`: draft tokens verified, draft tokens accepted, and its duration."""

    def count(self, name: str, steps: int = 1) -> None:
        """Add to a counter."""
        self.counters[name] = self.counters.get(name, 0) + steps
