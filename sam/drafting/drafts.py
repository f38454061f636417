"""What a drafter returns."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Drafts:
    """Drafts of a batch, one request after the other.

    Attributes:
        token_ids: int32 [total], the draft tokens; those of request i are token_ids[offsets[i]:offsets[i + 1]].
        offsets: int64 [batch + 1], where each request's draft begins, and the total.
        acceptance: float32 [total], cumulative acceptance probability: that of a token and all draft tokens before it,
            0 to 1, never rising within a draft.
        match_lengths: int32 [batch], tokens of the repeated suffix that each request is drafted from.

    Example:
        >>> from sam.drafting.drafter import Drafter
        >>> drafter = Drafter(max_draft_tokens=3)
        >>> drafter.start("a", np.array([5, 6, 7, 8]))
        >>> drafter.start("b", np.array([5, 6, 7, 8]))
        >>> drafts = drafter.step(["a", "b"], np.array([5, 6, 9]), offsets=[0, 2, 3], budgets=[3, 1])
        >>> drafts.token_ids
        array([7, 8, 5, 6], dtype=int32)
        >>> drafts.offsets
        array([0, 3, 4])
        >>> drafts.acceptance.round(2)
        array([0.73, 0.48, 0.2 , 0.38], dtype=float32)
        >>> drafts.match_lengths
        array([2, 0], dtype=int32)
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    acceptance: np.ndarray
    match_lengths: np.ndarray
