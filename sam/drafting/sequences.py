"""The followed texts: where each stands in its automaton, and its last draft."""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.jit import kernel

_SEQUENCE_FIELDS = (
    "group",  # NONE: it has none and gets no drafts
    "end",  # the state in which the text ends
    "num_tokens",
    "recovery_state",  # sam.drafting.context_mixing; NONE: there is none
    "recovery_match_len",
    "tokens_since_mismatch",
    "num_mismatches",  # since the recovery context began, without the first
    "corpus_state",
    "corpus_match_len",
    "num_drafted",  # tokens of the last draft, while it is not settled
    "draft_table",  # that the last draft counts in
)
SEQUENCE = np.dtype([(name, "i8") for name in _SEQUENCE_FIELDS], align=True)


class Sequences(NamedTuple):
    """Followed texts, a slot each, and their last drafts.

    Attributes:
        texts: SEQUENCE [slots].
        draft_tokens: int32 [slots, max_draft_tokens].
        draft_bins: int32 [slots, max_draft_tokens], bins of the tokens' raw probabilities.
        draft_acceptance: float64 [slots, max_draft_tokens], cumulative acceptance probabilities.
    """

    texts: np.ndarray
    draft_tokens: np.ndarray
    draft_bins: np.ndarray
    draft_acceptance: np.ndarray


def make_sequences(slots: int, max_draft_tokens: int) -> Sequences:
    """Slots without a text."""
    shape = slots, max_draft_tokens
    return Sequences(np.zeros(slots, SEQUENCE), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape))


@kernel
def start_sequence(sequences, slot, group, end, num_tokens):
    """Give the slot to a new text."""
    text = sequences.texts[slot]
    text.group, text.end, text.num_tokens = group, end, num_tokens
    text.recovery_state = NONE
    text.corpus_state = text.corpus_match_len = text.num_drafted = 0
