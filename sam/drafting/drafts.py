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
    """

    token_ids: np.ndarray
    offsets: np.ndarray
    acceptance: np.ndarray
    match_lengths: np.ndarray
