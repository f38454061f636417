"""A drafter that drafts nothing: in sam's place where another source drafts alone."""

import numpy as np

from sam.drafting.drafts import Drafts


class NoText:
    """Knows how long each text is, and no more; methods and errors as sam.drafting.drafter.Drafter's.

    Example:
        >>> drafter = NoText()
        >>> drafter.start("a", np.array([5, 6]))
        >>> drafter.append(["a"], np.array([7]), np.array([0, 1]))
        >>> drafter.draft(["a"], np.array([3])).token_ids
        array([], dtype=int32)
        >>> drafter.num_tokens("a")
        3
    """

    def __init__(self):
        self.counters: dict[str, int] = {}
        self._lengths: dict[str, int] = {}

    def start(self, request_id: str, prompt_token_ids: np.ndarray, policy_version: int = 0) -> None:
        """Follow a request's length."""
        if request_id in self._lengths:
            raise ValueError(f"request {request_id!r} is followed already: finish it first")
        self._lengths[request_id] = len(prompt_token_ids)

    def append(self, request_ids, token_ids: np.ndarray, offsets: np.ndarray) -> None:
        """Count new tokens."""
        for request_id, count in zip(request_ids, np.diff(offsets).tolist(), strict=True):
            self._lengths[request_id] += count

    def draft(self, request_ids, budgets, min_acceptance: float = 0.0) -> Drafts:
        """Draft nothing."""
        nothing = np.zeros(len(request_ids), np.int32)
        return Drafts(nothing[:0], np.zeros(len(request_ids) + 1, np.int64), np.zeros(0, np.float32), nothing)

    def finish(self, request_id: str) -> None:
        """Stop following."""
        del self._lengths[request_id]

    def lengths(self, request_ids) -> np.ndarray:
        """int64 [batch], tokens of each request."""
        return np.array([self._lengths[request_id] for request_id in request_ids], np.int64)

    def num_tokens(self, request_id: str) -> int:
        """As `lengths`, of one request."""
        return self._lengths[request_id]

    def warm_up(self) -> None:
        """Nothing to compile."""
