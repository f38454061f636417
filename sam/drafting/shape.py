"""The shape of a step's drafts: each as long as it was drafted (ragged), or all equally long (uniform).

A graph that was captured for 1 + k tokens of every request replays for such steps only. In a uniform step every request
verifies k tokens: missing ones are filled up, and verification rejects them as it rejects any wrong draft.
"""

from collections.abc import Sequence

import numpy as np

# Any token id will do: where it happens to be the token that is sampled, accepting it is right.
FILLER = 0


def is_uniform(draft_shape: str, graph_mode: str | None) -> bool:
    """Whether drafts are filled up: as asked, or with `auto` where the graph mode, vLLM's, has no graph for others."""
    return draft_shape == "uniform" or (draft_shape == "auto" and graph_mode == "FULL_DECODE_ONLY")


def fill_up(
    drafts: list[list[int]], emitted: Sequence[int], room: np.ndarray, length: int, rows: Sequence[int] | None = None
) -> int:
    """Make every draft `length` tokens long, in place, if any request has a draft and none is still in its prompt.

    Where one has no room for a whole draft, all are dropped: such a step decodes plainly, which replays a graph too.

    Args:
        drafts: token ids by request.
        emitted: tokens that each request's last step brought; 0 in its prompt.
        room: int [requests], draft tokens that fit before the longest length of a text.
        rows: requests that are looked at; None: all.

    Returns:
        The tokens that were filled in.
    """
    rows = range(len(drafts)) if rows is None else rows
    drafted = sum(len(drafts[row]) for row in rows)
    if not drafted or not all(emitted[row] for row in rows):
        return 0
    fits = min(room[row] for row in rows) >= length
    for row in rows:
        drafts[row][:] = drafts[row] + [FILLER] * (length - len(drafts[row])) if fits else []
    return length * len(rows) - drafted if fits else 0
