"""Where the automata live: blocks of records in one store, shared by all groups.

A suffix automaton of t tokens has at most 2t states and 3t transitions, also of several sequences (Blumer et al.,
1987). Most states have one transition, so a state's record holds the first one, and only further ones have records of
their own, of which there are at most t. A block of 3 x `BLOCK_TOKENS` records thus holds that many tokens, whatever
they are. Blocks are taken when a group grows and go back when it is dropped: nothing is ever copied or hashed anew,
so no step waits for growth. Memory is reserved at once but costs nothing until it is touched.

Further transitions are found by a hash of (state, token) with linear hashing (Litwin, 1980): one bucket is split for
each transition added, so the table follows their number without a pause. The transitions of a dropped group leave
the table when their block is taken again. Its blocks are taken again from the last to the first: a transition is never
in an earlier block than its state, so no state comes back while the table still has transitions of its former life.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from sam.jit import compiled

NONE = -1
BLOCK_TOKENS = 32
BLOCK_RECORDS = 3 * BLOCK_TOKENS

# Columns that both kinds of record have: a transition. It is named by its record, so a state's first transition has
# the state's own name.
TOKEN, TARGET, COUNT = 5, 6, 7
# Columns of a state: length of its longest string, suffix link, counts of its transitions added up (0: it has none),
# the most frequent of them (of equals the latest), and the first of its further ones.
LENGTH, LINK, TOTAL, BEST, FURTHER = 0, 1, 2, 3, 4
# Columns of a further transition: its state, the next one of that state, the next one in the hash bucket.
SOURCE, NEXT, CHAIN = 0, 1, 2
IN_TABLE = -2  # what a further transition has where a state has FURTHER
# Columns of a group: its chain of blocks, the block and place of its next record, and its tokens. The last two belong
# to the block of that number, not to the group: the blocks after and before it.
FIRST_BLOCK, LAST_BLOCK, BLOCKS, BLOCK, USED, TOKENS, FOLLOWING, PRECEDING = range(8)
# Counters of a store: hash buckets in use and the largest power of two among them, transitions in the table,
# blocks ever taken, the dropped block to take next, blocks of live groups.
BUCKETS, LEVEL, LINKED, TOUCHED, DROPPED, IN_USE = range(6)

BLOCK_BYTES = 4 * (8 * BLOCK_RECORDS + BLOCK_TOKENS) + 8 * 8


class Store(NamedTuple):
    """Arrays of a number of blocks. Kernels take them one by one: numba counts references to the fields of a tuple,
    which made them eight times slower.

    Attributes:
        records: int32 [blocks * BLOCK_RECORDS, 8], states and further transitions; none straddles two cache lines.
        heads: int32 [blocks * BLOCK_TOKENS], first transition of each hash bucket.
        groups: int64 [blocks, 8], columns of groups and of blocks.
        sizes: int64 [6].
    """

    records: np.ndarray
    heads: np.ndarray
    groups: np.ndarray
    sizes: np.ndarray


def make_store(blocks: int) -> Store:
    """An empty store. Its memory is reserved and not touched.

    Raises:
        ValueError: no block, or more than 32-bit indices can name.
    """
    most = np.iinfo(np.int32).max // BLOCK_RECORDS
    if not 1 <= blocks <= most:
        raise ValueError(f"a budget of {blocks * BLOCK_BYTES} bytes: expected {BLOCK_BYTES} to {most * BLOCK_BYTES}")
    # Not zeros: numpy asks for huge pages where it need not clear memory; without them every look-up misses the TLB.
    room = np.empty(blocks * BLOCK_RECORDS * 8 + 8, dtype=np.int32)
    aligned = (-room.ctypes.data % 32) // 4
    store = Store(
        records=room[aligned : aligned + blocks * BLOCK_RECORDS * 8].reshape(-1, 8),
        heads=np.empty(blocks * BLOCK_TOKENS, dtype=np.int32),
        groups=np.zeros((blocks, 8), dtype=np.int64),
        sizes=np.array([1, 1, 0, 0, NONE, 0], dtype=np.int64),
    )
    store.heads[0] = NONE
    return store


def blocks_for(tokens: int) -> int:
    """Blocks that hold any `tokens` tokens and the root."""
    return -(-(tokens + 1) // BLOCK_TOKENS)


@compiled
def _hash(state, token):
    h = (np.uint64(state) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    return h ^ (h >> np.uint64(29))


@compiled
def _bucket(sizes, hashed):
    bucket = np.int64(hashed & np.uint64(2 * sizes[LEVEL] - 1))
    return bucket if bucket < sizes[BUCKETS] else bucket - sizes[LEVEL]


@compiled
def find(records, heads, sizes, state, token):
    """The transition of `state` by `token`, or NONE."""
    if records[state, TOTAL] == 0:
        return NONE
    if records[state, TOKEN] == token:
        return state
    if records[state, FURTHER] == NONE:
        return NONE
    edge = np.int64(heads[_bucket(sizes, _hash(state, token))])
    while edge != NONE and (records[edge, SOURCE] != state or records[edge, TOKEN] != token):
        edge = np.int64(records[edge, CHAIN])
    return edge


@compiled
def _split_bucket(records, heads, sizes):
    new = sizes[BUCKETS]
    old = new - sizes[LEVEL]
    edge, kept, moved = heads[old], NONE, NONE
    while edge != NONE:
        rest = records[edge, CHAIN]
        hashed = _hash(records[edge, SOURCE], records[edge, TOKEN])
        if np.int64(hashed & np.uint64(2 * sizes[LEVEL] - 1)) == new:
            records[edge, CHAIN] = moved
            moved = edge
        else:
            records[edge, CHAIN] = kept
            kept = edge
        edge = rest
    heads[old], heads[new] = kept, moved
    sizes[BUCKETS] += 1
    if sizes[BUCKETS] == 2 * sizes[LEVEL]:
        sizes[LEVEL] = sizes[BUCKETS]


@compiled
def _link(records, heads, sizes, edge):
    """Put a further transition into the table."""
    sizes[LINKED] += 1
    if sizes[LINKED] > sizes[BUCKETS]:
        _split_bucket(records, heads, sizes)
    bucket = _bucket(sizes, _hash(records[edge, SOURCE], records[edge, TOKEN]))
    records[edge, CHAIN] = heads[bucket]
    heads[bucket] = edge


@compiled
def _unlink(records, heads, sizes, edge):
    """Take a further transition out of the table."""
    bucket = _bucket(sizes, _hash(records[edge, SOURCE], records[edge, TOKEN]))
    before = heads[bucket]
    if before == edge:
        heads[bucket] = records[edge, CHAIN]
    else:
        while records[before, CHAIN] != edge:
            before = records[before, CHAIN]
        records[before, CHAIN] = records[edge, CHAIN]
    sizes[LINKED] -= 1


@compiled
def _take_block(records, heads, groups, sizes):
    """A free block, dropped ones first; the caller has made sure that there is one."""
    block = sizes[DROPPED]
    if block == NONE:
        block = sizes[TOUCHED]
        sizes[TOUCHED] += 1
    else:
        sizes[DROPPED] = groups[block, PRECEDING]
        for record in range(block * BLOCK_RECORDS, (block + 1) * BLOCK_RECORDS):
            if records[record, FURTHER] == IN_TABLE:
                _unlink(records, heads, sizes, record)
    # All of it: what memory held before must not reach a saved file.
    records[block * BLOCK_RECORDS : (block + 1) * BLOCK_RECORDS] = 0
    records[block * BLOCK_RECORDS : (block + 1) * BLOCK_RECORDS, FURTHER] = NONE
    groups[block, FOLLOWING] = groups[block, PRECEDING] = NONE
    sizes[IN_USE] += 1
    return block


@compiled
def _new_record(groups, group):
    if groups[group, USED] == BLOCK_RECORDS:
        groups[group, BLOCK] = groups[groups[group, BLOCK], FOLLOWING]
        groups[group, USED] = 0
        if groups[group, BLOCK] == NONE:
            raise RuntimeError("a group needs more records than the bound of suffix automata allows")
    groups[group, USED] += 1
    return groups[group, BLOCK] * BLOCK_RECORDS + groups[group, USED] - 1


@compiled
def add_group(records, heads, groups, sizes, group):
    """Make `group` an automaton of no tokens, with the root as its only state; returns the root."""
    block = _take_block(records, heads, groups, sizes)
    groups[group, FIRST_BLOCK] = groups[group, LAST_BLOCK] = groups[group, BLOCK] = block
    groups[group, BLOCKS] = 1
    groups[group, USED] = groups[group, TOKENS] = 0
    return add_state(records, groups, group, 0, NONE)


@compiled
def reserve(records, heads, groups, sizes, group, tokens):
    """Make room for `tokens` more and count them; False, with nothing changed, if blocks are short."""
    missing = (groups[group, TOKENS] + tokens + BLOCK_TOKENS) // BLOCK_TOKENS - groups[group, BLOCKS]
    if missing > groups.shape[0] - sizes[IN_USE]:
        return False
    for _ in range(missing):
        block = _take_block(records, heads, groups, sizes)
        groups[groups[group, LAST_BLOCK], FOLLOWING], groups[block, PRECEDING] = block, groups[group, LAST_BLOCK]
        groups[group, LAST_BLOCK] = block
        groups[group, BLOCKS] += 1
    groups[group, TOKENS] += tokens
    return True


@compiled
def drop_group(groups, sizes, group):
    """Give back the blocks of `group`, at once whatever its size."""
    groups[groups[group, FIRST_BLOCK], PRECEDING] = sizes[DROPPED]
    sizes[DROPPED] = groups[group, LAST_BLOCK]
    sizes[IN_USE] -= groups[group, BLOCKS]
    groups[group, BLOCKS] = groups[group, TOKENS] = 0


@compiled
def add_state(records, groups, group, length, link):
    state = _new_record(groups, group)
    records[state, LENGTH], records[state, LINK] = length, link
    records[state, TOTAL] = records[state, COUNT] = 0
    records[state, BEST] = records[state, FURTHER] = NONE
    return state


@compiled
def add_edge(records, heads, groups, sizes, group, state, token, target, count):
    """Give `state` a transition that it does not have yet; returns it."""
    edge = np.int64(state)
    if records[state, TOTAL] != 0:
        edge = _new_record(groups, group)
        records[edge, SOURCE], records[edge, NEXT] = state, records[state, FURTHER]
        records[edge, FURTHER] = IN_TABLE
        records[state, FURTHER] = edge
    records[edge, TOKEN], records[edge, TARGET], records[edge, COUNT] = token, target, count
    records[state, TOTAL] += count
    best = records[state, BEST]
    if best == NONE or count >= records[best, COUNT]:
        records[state, BEST] = edge
    if edge != state:
        _link(records, heads, sizes, edge)
    return edge
