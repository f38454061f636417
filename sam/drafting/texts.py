"""Token ids, the followed texts with their last drafts, and what a drafter returns."""

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
