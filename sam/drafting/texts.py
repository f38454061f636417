"""Token ids, the followed texts with their last drafts, how often drafts are accepted, and what a drafter returns.

Acceptance probabilities are calibrated by how often earlier drafts were accepted. A table counts how often draft tokens
of a raw probability (that of the draft up to there), at a position of a draft, were accepted. While a bin has seen
little, it is taken to be as right as all drafts together lately: the raw probability times accepted over expected
(empirical Bayes: Efron, Large-Scale Inference, chapter 1). Drafts that were not verified count too: their tokens are
compared with the sampled ones.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.jit import kernel

DIGEST_BYTES = 16


def digest(tokens: np.ndarray) -> bytes:
    """The DIGEST_BYTES by which a text is known in all processes and files: blake2b of its token ids as int32."""
    return hashlib.blake2b(np.ascontiguousarray(tokens, np.int32), digest_size=DIGEST_BYTES).digest()


def check_token_ids(token_ids: np.ndarray, name: str) -> np.ndarray:
    """`token_ids` as int32 [length]; ValueError, which begins with `name`: not integers from 0 to 2**31 - 1."""
    tokens = np.asarray(token_ids)
    if tokens.size and (tokens.dtype.kind not in "iu" or tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise ValueError(f"{name}: expected token ids from 0 to 2**31 - 1, got {tokens.dtype} {tokens[:8]}")
    return np.ascontiguousarray(tokens, dtype=np.int32).ravel()


# Bins of a table.
POSITIONS = 4
PROBABILITIES = 20
ALL = POSITIONS * PROBABILITIES  # index of the entry for all bins together
PRIOR = 8.0  # observations that a raw probability counts for
OVERALL_PRIOR = 8.0  # tokens, expected and accepted, before there were any
FORGET = 4096.0  # observations after which a bin's older half counts half
OVERALL_FORGET = 64.0  # expected tokens after which the older half of all together counts half

# `expected` is the number of draft tokens in a bin, and the sum of their raw probabilities in the entry for all bins.
ACCEPTANCE = np.dtype([("accepted", "f8"), ("expected", "f8")], align=True)
RECENT_TOKENS = 8  # of a text that the memory of other prompts sees
_SEQUENCE_FIELDS = (
    "group",  # NONE: it has none and gets no drafts
    "end",  # the state in which the text ends
    "num_tokens",
    "num_prompt_tokens",  # of them, those it began with
    "recovery_state",  # sam.drafting.context_mixing; NONE: there is none
    "recovery_match_len",
    "tokens_since_mismatch",
    "num_mismatches",  # since the recovery context began, without the first
    "num_drafted",  # tokens of the last draft, while it is not settled
    "prompt_tag",  # sam.drafting.prompt_memory
)
SEQUENCE = np.dtype([(name, "i8") for name in _SEQUENCE_FIELDS], align=True)


class Sequences(NamedTuple):
    """Followed texts, a slot each, and their last drafts."""

    texts: np.ndarray  # SEQUENCE [slots]
    draft_tokens: np.ndarray  # int32 [slots, max_draft_tokens]
    draft_bins: np.ndarray  # int32 [slots, max_draft_tokens], bins of the tokens' raw probabilities
    draft_acceptance: np.ndarray  # float64 [slots, max_draft_tokens], cumulative acceptance probabilities
    recent_tokens: np.ndarray  # int32 [slots, RECENT_TOKENS], that at a text's position p in column p % RECENT_TOKENS


def make_sequences(slots: int, max_draft_tokens: int) -> Sequences:
    """Slots without a text."""
    return Sequences(
        texts=np.zeros(slots, SEQUENCE),
        draft_tokens=np.zeros((slots, max_draft_tokens), np.int32),
        draft_bins=np.zeros((slots, max_draft_tokens), np.int32),
        draft_acceptance=np.zeros((slots, max_draft_tokens), np.float64),
        recent_tokens=np.zeros((slots, RECENT_TOKENS), np.int32),
    )


def make_acceptance() -> np.ndarray:
    """ACCEPTANCE [ALL + 1]: an empty table."""
    return np.zeros(ALL + 1, ACCEPTANCE)


@kernel
def start_sequence(sequences, slot, group, end, prompt, prompt_tag):
    """Give the slot to a new text that begins with `prompt` (int32 [length])."""
    text = sequences.texts[slot]
    text.group = group
    text.end = end
    text.prompt_tag = prompt_tag
    text.num_tokens = text.num_prompt_tokens = prompt.size
    text.recovery_state = NONE
    text.num_drafted = 0
    for position in range(max(0, prompt.size - RECENT_TOKENS), prompt.size):
        sequences.recent_tokens[slot, position % RECENT_TOKENS] = prompt[position]


@kernel
def token_at(sequences, slot, position):
    """The token at a position of the slot's text, of its last RECENT_TOKENS, or of the draft after it."""
    ahead = position - sequences.texts[slot].num_tokens
    if ahead >= 0:
        return sequences.draft_tokens[slot, ahead]
    return sequences.recent_tokens[slot, position % RECENT_TOKENS]


@dataclass
class Drafts:
    """Drafts of a batch, one request after the other."""

    token_ids: np.ndarray  # int32 [total]; those of request i are token_ids[offsets[i]:offsets[i + 1]]
    offsets: np.ndarray  # int64 [batch + 1], where each request's draft begins, and the total
    acceptance: np.ndarray  # float32 [total], probability that a token and those before it in the draft are accepted


@kernel
def bin_of(position, probability):
    """Index in a table for a draft token at `position` of its draft."""
    return min(position, POSITIONS - 1) * PROBABILITIES + min(PROBABILITIES - 1, int(PROBABILITIES * probability))


@kernel
def acceptance_probability(acceptance, index, probability):
    """Share of the draft tokens with this raw probability that were accepted."""
    overall = acceptance[ALL]
    entry = acceptance[index]
    probability *= min(1.0, (overall.accepted + OVERALL_PRIOR) / (overall.expected + OVERALL_PRIOR))
    return (entry.accepted + PRIOR * probability) / (entry.expected + PRIOR)


@kernel
def add_draft_token(acceptance, sequences, slot, token, probability, min_acceptance):
    """Add `token` to the slot's draft, whose raw cumulative probability with it is `probability`.

    Returns:
        False, with nothing changed, if its cumulative acceptance probability is below `min_acceptance`.
    """
    text = sequences.texts[slot]
    position = text.num_drafted
    index = bin_of(position, probability)
    cumulative = 1.0 if position == 0 else sequences.draft_acceptance[slot, position - 1]
    cumulative = min(cumulative, acceptance_probability(acceptance, index, probability))
    if cumulative < min_acceptance:
        return False
    sequences.draft_tokens[slot, position] = token
    sequences.draft_bins[slot, position] = index
    sequences.draft_acceptance[slot, position] = cumulative
    text.num_drafted += 1
    return True


@kernel
def update_calibration(acceptance, sequences, slot, tokens, first, last):
    """Count which tokens of the last draft the text's new tokens, tokens[first:last], accepted."""
    text = sequences.texts[slot]
    accepted = True
    for i in range(text.num_drafted):
        if accepted and first + i == last:
            break  # the text was cut short: whether this one would have been accepted is not known
        accepted = accepted and sequences.draft_tokens[slot, i] == tokens[first + i]
        index = sequences.draft_bins[slot, i]
        _count(acceptance[index], accepted, 1.0, FORGET)
        expected = (index % PROBABILITIES + 0.5) / PROBABILITIES
        _count(acceptance[ALL], accepted, expected, OVERALL_FORGET)
    text.num_drafted = 0


@kernel
def _count(entry, accepted, expected, forget):
    entry.accepted += accepted
    entry.expected += expected
    if entry.expected >= forget:
        entry.accepted *= 0.5
        entry.expected *= 0.5
