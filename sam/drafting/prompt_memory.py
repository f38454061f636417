"""The memory of other prompts: what followed short contexts lately in the text of any prompt.

Answers to different prompts share boilerplate (calls of tools, JSON keys, code, phrases) that a group's own automaton
cannot know. The last 2, 4 and 8 tokens of a text are hashed; a row of a fixed table holds the tokens that followed such
a context, and in the text of how many prompts: the samples of a prompt count once in a row, as they have an automaton
of their own. Context hashing is that of data compressors (Mahoney, PAQ, 2005). Of the two rows that may hold a context
the one not seen for longest is overwritten.
"""

import zlib
from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE, aligned_memory, overlapping
from sam.drafting.texts import token_at
from sam.jit import kernel

ORDERS = 2, 4, 8  # tokens of a context, one order for each strength
STRENGTHS = len(ORDERS)
CANDIDATES = 3  # tokens that a row holds
MOST_BYTES = 64 << 20
BUDGET_SHARE = 16  # of a memory budget at most one part in 16
MOST_COUNTED = 1000

# A row is an entry for its context and CANDIDATES entries for tokens, 32 bytes in all; two rows share a cache line.
_ENTRY_OFFSETS = {
    "token": 0,
    "count": 4,  # prompts in whose text it followed; 0: none
    "prompt_tag": 6,  # of the text in which it followed last
    "last_seen": 0,  # of the context: tokens written until then
    "check": 6,  # further bits of its hash
}
ENTRY = overlapping(_ENTRY_OFFSETS, ["i4", "u2", "u2", "u4", "u2"], 8)


class PromptMemory(NamedTuple):
    """A table of rows."""

    entries: np.ndarray  # ENTRY [rows, 1 + CANDIDATES]; no rows: there is no memory
    written: np.ndarray  # int64 [1], tokens written so far


def make_memory(budget_bytes: int) -> PromptMemory:
    """An empty memory of at most `budget_bytes`; of less than two rows, no memory."""
    row_bytes = ENTRY.itemsize * (1 + CANDIDATES)
    rows = min(budget_bytes, MOST_BYTES) // row_bytes
    rows = 1 << (rows.bit_length() - 1) if rows >= 2 else 0
    memory = aligned_memory(rows * row_bytes, 64)
    memory[:] = 0
    return PromptMemory(memory.view(ENTRY).reshape(rows, 1 + CANDIDATES), np.zeros(1, np.int64))


class Continuations(NamedTuple):
    """What the memory has seen to follow a text."""

    strength: int  # 0 to STRENGTHS - 1, how much of the text it has recognised
    total: int  # of the counts; 0: it has nothing to say
    best: int  # index of the token that was counted most often
    tokens: tuple[int, int, int]
    counts: tuple[int, int, int]


@kernel
def nothing():
    """The Continuations of a text that is not known."""
    none = np.int64(NONE)
    zero = np.int64(0)
    return Continuations(zero, zero, zero, (none, none, none), (zero, zero, zero))


@kernel
def share_of(continuations, token):
    """Share of `token` among the tokens that followed; of continuations with a total."""
    for i in range(CANDIDATES):
        if continuations.tokens[i] == token and continuations.counts[i] != 0:
            return continuations.counts[i] / continuations.total
    return 0.0


@kernel
def is_best(continuations, token):
    """Whether `token` followed most often."""
    return continuations.total != 0 and continuations.tokens[continuations.best] == token


def prompt_tag(prompt: np.ndarray) -> int:
    """16 bits of a hash of a prompt (int32 [length]), by which rows know whose text a token followed in last."""
    return zlib.crc32(prompt) & 0xFFFF


def corpus_tag(prompt: np.ndarray) -> int:
    """As `prompt_tag`, of a text of a corpus: a prompt that comes again does not count it as its own."""
    return zlib.crc32(prompt, 1) & 0xFFFF


@kernel
def _hashes(sequences, slot, end):
    """Hashes of the last 2, 4 and 8 tokens before position `end`; 0 where there are fewer."""
    h = np.uint64(end > 0)
    two = np.uint64(0)
    four = np.uint64(0)
    eight = np.uint64(0)
    for back in range(1, min(end, ORDERS[2]) + 1):
        h = (h + np.uint64(token_at(sequences, slot, end - back) + 1)) * np.uint64(0x9E3779B97F4A7C15)
        h ^= h >> np.uint64(29)
        if back == ORDERS[0]:
            two = h
        elif back == ORDERS[1]:
            four = h
        elif back == ORDERS[2]:
            eight = h
    return two, four, eight


@kernel
def _find_row(entries, h):
    """The row of a context, or NONE."""
    check = np.uint16(h >> np.uint64(48))
    row = np.int64(h & np.uint64(entries.shape[0] - 1))
    for candidate in (row, row ^ 1):
        if entries[candidate, 0].check == check and entries[candidate, 1].count != 0:
            return candidate
    return np.int64(NONE)


@kernel
def _take_row(entries, h):
    """An empty row for a context, in place of the one not seen for longest."""
    row = np.int64(h & np.uint64(entries.shape[0] - 1))
    other = row ^ 1
    if entries[row, 1].count != 0 and (
        entries[other, 1].count == 0 or entries[other, 0].last_seen < entries[row, 0].last_seen
    ):
        row = other
    for i in range(1, 1 + CANDIDATES):
        entries[row, i].count = 0
    entries[row, 0].check = np.uint16(h >> np.uint64(48))
    return row


@kernel
def _count_elsewhere(entry, prompt_tag):
    """Prompts in whose text an entry's token followed, without the one of `prompt_tag`; int64."""
    return max(np.int64(entry.count) - (entry.prompt_tag == prompt_tag), np.int64(0))


@kernel
def recall(memory, sequences, slot, num_ahead):
    """What followed the longest known context at the end of the slot's text and `num_ahead` tokens of its draft, in the
    texts of other prompts."""
    entries = memory.entries
    text = sequences.texts[slot]
    if entries.shape[0] == 0:
        return nothing()
    hashes = _hashes(sequences, slot, text.num_tokens + num_ahead)
    for strength in range(STRENGTHS - 1, -1, -1):
        row = _find_row(entries, hashes[strength]) if hashes[strength] != 0 else np.int64(NONE)
        if row == NONE:
            continue
        first = entries[row, 1]
        second = entries[row, 2]
        third = entries[row, 3]
        counts = (
            _count_elsewhere(first, text.prompt_tag),
            _count_elsewhere(second, text.prompt_tag),
            _count_elsewhere(third, text.prompt_tag),
        )
        total = counts[0] + counts[1] + counts[2]
        if total == 0:
            continue
        tokens = np.int64(first.token), np.int64(second.token), np.int64(third.token)
        best = np.int64(0)
        for i in range(1, CANDIDATES):
            best = np.int64(i) if counts[i] > counts[best] else best
        return Continuations(np.int64(strength), total, best, tokens, counts)
    return nothing()


@kernel
def remember(memory, sequences, slot, token):
    """Write `token`, which follows the slot's text and is not yet appended, to the row of each of its contexts."""
    entries = memory.entries
    text = sequences.texts[slot]
    if entries.shape[0] == 0:
        return
    memory.written[0] += 1
    hashes = _hashes(sequences, slot, text.num_tokens)
    for i in range(STRENGTHS):
        if hashes[i] != 0:
            row = _find_row(entries, hashes[i])
            row = row if row != NONE else _take_row(entries, hashes[i])
            _count(entries, row, token, text.prompt_tag)
            entries[row, 0].last_seen = memory.written[0]


@kernel
def _count(entries, row, token, prompt_tag):
    rarest = 1
    for i in range(1, 1 + CANDIDATES):
        entry = entries[row, i]
        if entry.count != 0 and entry.token == token:
            if entry.prompt_tag != prompt_tag:
                entry.prompt_tag = prompt_tag
                entry.count = min(entry.count + 1, MOST_COUNTED)
            return
        if entry.count < entries[row, rarest].count:
            rarest = i
    entry = entries[row, rarest]
    entry.token = token
    entry.count = 1
    entry.prompt_tag = prompt_tag
