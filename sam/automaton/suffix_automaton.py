"""A counted, generalised, online suffix automaton.

Blumer et al. (1985) give the construction; here several sequences grow interleaved, each with its own end state, and
transitions are counted. A token is counted in the longest context in which it had been seen before, and begins with
one in every longer context; shorter ones are left alone. Data compression calls this update exclusion (Moffat, 1990);
on recordings it predicts better than counting in all contexts, and ends the walk along the suffix links early.
"""

from __future__ import annotations

import numpy as np

from sam.automaton.store import (
    BEST,
    COUNT,
    FURTHER,
    LENGTH,
    LINK,
    NEXT,
    NONE,
    TARGET,
    TOKEN,
    TOTAL,
    add_edge,
    add_state,
    find,
)
from sam.jit import compiled


@compiled
def _count(records, state, edge):
    records[edge, COUNT] += 1
    records[state, TOTAL] += 1
    if records[edge, COUNT] >= records[records[state, BEST], COUNT]:
        records[state, BEST] = edge


@compiled
def _clone(records, heads, groups, sizes, group, original, length):
    """The shorter strings of `original` get a state of their own."""
    clone = add_state(records, groups, group, length, records[original, LINK])
    edge, best = np.int64(original if records[original, TOTAL] else NONE), NONE
    while edge != NONE:
        token, target, count = records[edge, TOKEN], records[edge, TARGET], records[edge, COUNT]
        copy = add_edge(records, heads, groups, sizes, group, clone, token, target, count)
        if edge == records[original, BEST]:
            best = copy
        edge = np.int64(records[edge, FURTHER if edge == original else NEXT])
    records[clone, BEST] = best
    records[original, LINK] = clone
    return clone


@compiled
def _redirect(records, heads, sizes, state, token, old, new):
    while state != NONE:
        edge = find(records, heads, sizes, state, token)
        if edge == NONE or records[edge, TARGET] != old:
            return
        records[edge, TARGET] = new
        state = records[state, LINK]


@compiled
def _target(records, heads, groups, sizes, group, state, token, edge):
    """The state of exactly `state`'s longest string and `token`, made if there is none."""
    target = records[edge, TARGET]
    length = records[state, LENGTH] + 1
    if records[target, LENGTH] == length:
        return target
    clone = _clone(records, heads, groups, sizes, group, target, length)
    _redirect(records, heads, sizes, state, token, target, clone)
    return clone


@compiled
def extend(records, heads, groups, sizes, group, last, token):
    """Append `token` to the sequence that ends in `last`; returns its new end state. Amortised O(1)."""
    edge = find(records, heads, sizes, last, token)
    if edge != NONE:
        _count(records, last, edge)
        return _target(records, heads, groups, sizes, group, last, token, edge)
    new = add_state(records, groups, group, records[last, LENGTH] + 1, NONE)
    state = last
    while edge == NONE:
        add_edge(records, heads, groups, sizes, group, state, token, new, 1)
        if records[state, LINK] == NONE:
            records[new, LINK] = state
            return new
        state = records[state, LINK]
        edge = find(records, heads, sizes, state, token)
    _count(records, state, edge)
    records[new, LINK] = _target(records, heads, groups, sizes, group, state, token, edge)
    return new
