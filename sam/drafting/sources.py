"""What a source outside the group tells the mixture of contexts; sam.drafting.prompt_memory is one."""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.jit import kernel

STRENGTHS = 3  # classes of how much of a text has been recognised; each has weights of its own
CANDIDATES = 3  # tokens that a source names at most


class Continuations(NamedTuple):
    """What a source has seen to follow a text.

    Attributes:
        strength: 0 to STRENGTHS - 1, how much of the text the source has recognised.
        total: of the counts; 0: the source has nothing to say.
        best: index of the token that was counted most often.
        tokens, counts: of each candidate.
    """

    strength: int
    total: int
    best: int
    tokens: tuple[int, int, int]
    counts: tuple[int, int, int]


@kernel
def nothing():
    """What a source without a word to say returns."""
    none, zero = np.int64(NONE), np.int64(0)
    return Continuations(zero, zero, zero, (none, none, none), (zero, zero, zero))


@kernel
def share_of(continuations, token):
    """Share of `token` among the tokens that a source outside the group has seen to follow."""
    for i in range(CANDIDATES):
        if continuations.tokens[i] == token and continuations.counts[i] != 0:
            return continuations.counts[i] / continuations.total
    return 0.0
