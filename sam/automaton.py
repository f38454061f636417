"""A counted, generalised, online suffix automaton in flat arrays.

Blumer et al. (1985) give the construction; here several sequences grow interleaved, each with its own end state,
and every transition counts how often it was taken, so that the most frequent continuation of a context can be
read off. One arena of arrays holds the automata of many groups, each with its own root, so that one compiled
call serves a whole batch.
"""

from __future__ import annotations

import numpy as np
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

NONE = -1

# Columns of the state table: longest string, suffix link, first transition, unused, transitions counted.
# Columns of the transition table: its key is (SOURCE, TOKEN), NEXT chains those of one state.
LENGTH, LINK, HEAD, EDGES, TOTAL = 0, 1, 2, 3, 4
TOKEN, TARGET, COUNT, TIME, NEXT, SOURCE = 0, 1, 2, 3, 4, 5
CLOCK = 2  # of an arena's sizes: states used, transitions used, tokens appended


@njit(cache=True)
def _slot(table, edges, state, token):
    mask = table.size - 1
    h = (np.uint64(state) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    h ^= h >> np.uint64(29)
    i = np.int64(h & np.uint64(mask))
    while True:
        edge = table[i]
        if edge == NONE or (edges[edge, SOURCE] == state and edges[edge, TOKEN] == token):
            return i
        i = (i + 1) & mask


@njit(cache=True)
def _find(table, edges, state, token):
    return table[_slot(table, edges, state, token)]


@njit(cache=True)
def _add_edge(states, edges, table, sizes, state, token, target, count, time):
    edge = sizes[1]
    sizes[1] += 1
    edges[edge, TOKEN] = token
    edges[edge, TARGET] = target
    edges[edge, COUNT] = count
    edges[edge, TIME] = time
    edges[edge, SOURCE] = state
    edges[edge, NEXT] = states[state, HEAD]
    states[state, HEAD] = edge
    states[state, TOTAL] += count
    table[_slot(table, edges, state, token)] = edge


@njit(cache=True)
def _add_state(states, sizes, length, link):
    state = sizes[0]
    sizes[0] += 1
    states[state, LENGTH] = length
    states[state, LINK] = link
    states[state, HEAD] = NONE
    states[state, TOTAL] = 0
    return state


@njit(cache=True)
def _clone(states, edges, table, sizes, original, length):
    clone = _add_state(states, sizes, length, states[original, LINK])
    edge = states[original, HEAD]
    while edge != NONE:
        _add_edge(
            states,
            edges,
            table,
            sizes,
            clone,
            edges[edge, TOKEN],
            edges[edge, TARGET],
            edges[edge, COUNT],
            edges[edge, TIME],
        )
        edge = edges[edge, NEXT]
    states[original, LINK] = clone
    return clone


@njit(cache=True)
def _redirect(states, edges, table, state, token, old, new):
    while state != NONE:
        edge = _find(table, edges, state, token)
        if edge == NONE or edges[edge, TARGET] != old:
            return
        edges[edge, TARGET] = new
        state = states[state, LINK]


@njit(cache=True)
def extend(states, edges, table, sizes, last, token, time):
    """Append `token` to the sequence that ends in `last`; returns its new end state. Amortised O(1), plus the
    suffix chain of `last`, whose transitions are counted."""
    state = last
    while state != NONE:
        edge = _find(table, edges, state, token)
        if edge != NONE:
            edges[edge, COUNT] += 1
            edges[edge, TIME] = time
            states[state, TOTAL] += 1
        state = states[state, LINK]

    edge = _find(table, edges, last, token)
    if edge != NONE:
        target = edges[edge, TARGET]
        if states[target, LENGTH] == states[last, LENGTH] + 1:
            return target
        clone = _clone(states, edges, table, sizes, target, states[last, LENGTH] + 1)
        _redirect(states, edges, table, last, token, target, clone)
        return clone

    new = _add_state(states, sizes, states[last, LENGTH] + 1, NONE)
    state = last
    edge = NONE
    while state != NONE:
        edge = _find(table, edges, state, token)
        if edge != NONE:
            break
        _add_edge(states, edges, table, sizes, state, token, new, 1, time)
        root = state
        state = states[state, LINK]
    if state == NONE:
        states[new, LINK] = root
        return new
    target = edges[edge, TARGET]
    if states[target, LENGTH] == states[state, LENGTH] + 1:
        states[new, LINK] = target
        return new
    clone = _clone(states, edges, table, sizes, target, states[state, LENGTH] + 1)
    _redirect(states, edges, table, state, token, target, clone)
    states[new, LINK] = clone
    return new


@njit(cache=True)
def draft(states, edges, last, budget, min_survival, tokens, survival):
    """Write up to `budget` tokens that survive with `min_survival` at least, and their survival probabilities; returns
    how many, and the match length."""
    state = last
    drafted = 0
    alive = 1.0
    match = -1
    while drafted < budget:
        while state != NONE and states[state, HEAD] == NONE:
            state = states[state, LINK]
        if state == NONE or states[state, LENGTH] == 0:
            break
        if match < 0:
            match = states[state, LENGTH]
        best = states[state, HEAD]
        edge = edges[best, NEXT]
        while edge != NONE:
            if edges[edge, COUNT] > edges[best, COUNT] or (
                edges[edge, COUNT] == edges[best, COUNT] and edges[edge, TIME] > edges[best, TIME]
            ):
                best = edge
            edge = edges[edge, NEXT]
        alive *= edges[best, COUNT] / (states[state, TOTAL] + 1.0)
        if alive < min_survival:
            break
        tokens[drafted] = edges[best, TOKEN]
        survival[drafted] = alive
        drafted += 1
        state = edges[best, TARGET]
    return drafted, max(match, 0)


@intrinsic
def _pointer(_typing_context, address):
    def generate(_context, builder, _signature, arguments):
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@njit(cache=True)
def _arrays(address):
    """The arrays of the arena at `address`, a row of `Arena.address`."""
    capacity = address[4]
    states = carray(_pointer(address[0]), (2 * capacity + 2, 5), np.int32)
    edges = carray(_pointer(address[1]), (3 * capacity + 2, 6), np.int32)
    table = carray(_pointer(address[2]), (max(1, 8 * capacity),), np.int32)
    sizes = carray(_pointer(address[3]), (3,), np.int64)
    return states, edges, table, sizes


@njit(cache=True)
def step_batch(addresses, ends, tokens, offsets, budgets, min_survival, out, survival, counts, matches):
    """Append each sequence's new tokens, then draft for each: all appends come first, so that siblings see them.
    One call for sequences of any arenas; an address of zeros is passed over."""
    for i in range(ends.size):
        if addresses[i, 0] == 0 or offsets[i] == offsets[i + 1]:
            continue
        states, edges, table, sizes = _arrays(addresses[i])
        for j in range(offsets[i], offsets[i + 1]):
            sizes[CLOCK] += 1
            ends[i] = extend(states, edges, table, sizes, ends[i], tokens[j], sizes[CLOCK])
    for i in range(ends.size):
        if addresses[i, 0] != 0 and budgets[i] > 0:
            states, edges, _, _ = _arrays(addresses[i])
            counts[i], matches[i] = draft(states, edges, ends[i], budgets[i], min_survival, out[i], survival[i])


@njit(cache=True)
def rebuild_table(table, edges, num_edges):
    table[:] = NONE
    for edge in range(num_edges):
        table[_slot(table, edges, edges[edge, SOURCE], edges[edge, TOKEN])] = edge


class Arena:
    """The automaton of one group in arrays that double as it grows.

    Attributes:
        tokens: appended so far, over all sequences of the group.
        capacity: tokens there is room for. A suffix automaton has at most 2 states and 3 transitions a token.
        frozen: no memory was left to grow; it neither learns nor drafts any more.
    """

    SMALLEST = 512

    def __init__(self, key: bytes):
        self.key = key
        self.capacity = self.tokens = self.live = 0
        self.frozen = False
        self.prompt_end: int | None = None
        self.states = np.empty((1, 5), dtype=np.int32)
        self.edges = np.empty((0, 6), dtype=np.int32)
        self.table = np.full(1, NONE, dtype=np.int32)
        self.sizes = np.zeros(3, dtype=np.int64)
        self.root = _add_state(self.states, self.sizes, 0, NONE)
        self.address = self._address()

    def _address(self) -> tuple[int, ...]:
        """What step_batch takes: where the arrays are, and the capacity that gives their shapes."""
        arrays = (self.states, self.edges, self.table, self.sizes)
        return (*(array.ctypes.data for array in arrays), self.capacity)

    def freeze(self) -> None:
        """Neither learn nor draft from now on."""
        self.frozen = True
        self.address = (0,) * len(self.address)

    @classmethod
    def bytes_for(cls, capacity: int) -> int:
        """Bytes of an arena with room for `capacity` tokens."""
        return 4 * (5 * (2 * capacity + 2) + 6 * (3 * capacity + 2) + 8 * capacity) if capacity else 0

    @property
    def nbytes(self) -> int:
        return self.bytes_for(self.capacity)

    def capacity_with(self, tokens: int) -> int:
        """The capacity after room for `tokens` more is made: a power of two."""
        needed = max(self.SMALLEST, self.tokens + tokens)
        return max(self.capacity, 1 << (needed - 1).bit_length())

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more and count them as appended."""
        capacity = self.capacity_with(tokens)
        self.tokens += tokens
        if capacity == self.capacity:
            return
        self.states = _grown(self.states, 2 * capacity + 2, self.sizes[0])
        self.edges = _grown(self.edges, 3 * capacity + 2, self.sizes[1])
        self.table = np.empty(8 * capacity, dtype=np.int32)
        rebuild_table(self.table, self.edges, self.sizes[1])
        self.capacity = capacity
        self.address = self._address()


def _grown(array: np.ndarray, rows: int, used: int) -> np.ndarray:
    larger = np.empty((rows, array.shape[1]), dtype=array.dtype)
    larger[:used] = array[:used]
    return larger
