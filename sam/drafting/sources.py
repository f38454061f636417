"""Sources outside the group: each says what has followed a text elsewhere, and joins the mixture of contexts.

A source is a class, a NamedTuple of flat arrays with two kernels; sam.drafting.registry lists those that a drafter has.
Kernels are called from compiled code, so that a source must be known by its type when that is compiled: a Python method
would cost more than drafting itself.
"""

from typing import NamedTuple, Protocol, Self

import numpy as np
from numba.extending import overload

from sam.automaton.store import NONE
from sam.jit import kernel

STRENGTHS = 3  # classes of how much of a text has been recognised; each has weights of its own
CANDIDATES = 3  # tokens that a source names at most


class Source(Protocol):
    """A NamedTuple class of arrays which a drafter fills and asks.

    Attributes:
        ORIGIN: one of sam.drafting.origins' numbers, under which its draft tokens are counted.
        recall: kernel (source, sequences, slot, num_ahead) that returns the Continuations of the slot's text and
            `num_ahead` tokens of its draft. Whatever it returns, its weights are learnt from what comes.
        remember: kernel (source, sequences, slot, token) that takes the token which follows the slot's text and is not
            yet appended.
    """

    ORIGIN: int

    @classmethod
    def make(cls, budget_bytes: int) -> Self:
        """A source that has seen nothing yet, of at most `budget_bytes`; of 0 it never has a word to say."""

    def start_version(self, policy_version: int) -> None:
        """A request has begun that weights of this version write, or of an earlier one."""


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
def one_token(token):
    """One token, seen once: what a source that counts nothing returns."""
    none, zero = np.int64(NONE), np.int64(0)
    return Continuations(zero, np.int64(1), zero, (np.int64(token), none, none), (np.int64(1), zero, zero))


@kernel
def share_of(continuations, token):
    """Share of `token` among the tokens that a source outside the group has seen to follow."""
    for i in range(CANDIDATES):
        if continuations.tokens[i] == token and continuations.counts[i] != 0:
            return continuations.counts[i] / continuations.total
    return 0.0


def recall_all(sources, sequences, slot, num_ahead):
    """Tuple of Continuations, of each of `sources`: a tuple of Source or one alone. Of compiled code only."""
    raise NotImplementedError


def say_nothing(sources):
    """As `recall_all`, of sources that have nothing to say."""
    raise NotImplementedError


def remember_all(sources, sequences, slot, token):
    """Give the token to each source; as `recall_all`."""
    raise NotImplementedError


def origins_of(sources):
    """Tuple of each source's ORIGIN; as `recall_all`."""
    raise NotImplementedError


# As sam.jit.kernel: without reference counts, and inlined where they are called.
_INLINED = {"_nrt": False, "forceinline": True, "nopython": True}


@overload(recall_all, jit_options=_INLINED)
def _recall_all(sources, sequences, slot, num_ahead):
    if hasattr(sources, "instance_class"):
        recall = sources.instance_class.recall
        return lambda sources, sequences, slot, num_ahead: (recall(sources, sequences, slot, num_ahead),)
    if len(sources) == 1:
        return lambda sources, sequences, slot, num_ahead: recall_all(sources[0], sequences, slot, num_ahead)
    return lambda sources, sequences, slot, num_ahead: (
        recall_all(sources[0], sequences, slot, num_ahead) + recall_all(sources[1:], sequences, slot, num_ahead)
    )


@overload(say_nothing, jit_options=_INLINED)
def _say_nothing(sources):
    if hasattr(sources, "instance_class") or len(sources) == 1:
        return lambda sources: (nothing(),)
    return lambda sources: (nothing(),) + say_nothing(sources[1:])


@overload(remember_all, jit_options=_INLINED)
def _remember_all(sources, sequences, slot, token):
    if hasattr(sources, "instance_class"):
        remember = sources.instance_class.remember
        return lambda sources, sequences, slot, token: remember(sources, sequences, slot, token)
    if len(sources) == 1:
        return lambda sources, sequences, slot, token: remember_all(sources[0], sequences, slot, token)

    def remember_each(sources, sequences, slot, token):
        remember_all(sources[0], sequences, slot, token)
        remember_all(sources[1:], sequences, slot, token)

    return remember_each


@overload(origins_of, jit_options=_INLINED)
def _origins_of(sources):
    if hasattr(sources, "instance_class"):
        origin = sources.instance_class.ORIGIN
        return lambda sources: (origin,)
    if len(sources) == 1:
        return lambda sources: origins_of(sources[0])
    return lambda sources: origins_of(sources[0]) + origins_of(sources[1:])


@kernel
def have_nothing(recalled):
    """Whether no source has a word to say."""
    for continuations in recalled:
        if continuations.total != 0:
            return False
    return True


@kernel
def is_best(recalled, first, last, token):
    """Whether `token` is what one of the sources recalled[first:last] has seen most often."""
    for i in range(first, last):
        if recalled[i].total != 0 and recalled[i].tokens[recalled[i].best] == token:
            return True
    return False
