"""A counted, generalised, online suffix automaton.

Blumer et al. (1985) give the construction; here several sequences grow interleaved, each with its own end state, and
transitions are counted. A token is counted in the longest context in which it had been seen before, and begins with
one in every longer context; shorter ones are left alone. Data compression calls this update exclusion (Moffat, 1990);
on recordings it predicts better than counting in all contexts, and ends the walk along the suffix links early.
"""

import numpy as np

from sam.automaton.store import NONE, add_edge, add_state, find
from sam.jit import kernel


@kernel
def _count(store, state, edge):
    nodes = store.nodes
    nodes[edge].count += 1
    nodes[state].total_count += 1
    if nodes[edge].count >= nodes[nodes[state].argmax_edge].count:
        nodes[state].argmax_edge = edge


@kernel
def _clone(store, group, original, length):
    """The shorter strings of `original` get a state of their own."""
    nodes = store.nodes
    clone = add_state(store, group, length, nodes[original].link)
    edge, argmax_edge = np.int64(original if nodes[original].total_count else NONE), NONE
    while edge != NONE:
        copy = add_edge(store, group, clone, nodes[edge].token, nodes[edge].target, nodes[edge].count)
        if edge == nodes[original].argmax_edge:
            argmax_edge = copy
        edge = np.int64(nodes[edge].first_extra_edge if edge == original else nodes[edge].next_edge)
    nodes[clone].argmax_edge = argmax_edge
    nodes[original].link = clone
    return clone


@kernel
def _redirect(store, state, token, old, new):
    nodes = store.nodes
    while state != NONE:
        edge = find(store, state, token)
        if edge == NONE or nodes[edge].target != old:
            return
        nodes[edge].target = new
        state = nodes[state].link


@kernel
def _target(store, group, state, token, edge):
    """The state of exactly `state`'s longest string and `token`, made if there is none."""
    nodes = store.nodes
    target = nodes[edge].target
    length = nodes[state].length + 1
    if nodes[target].length == length:
        return target
    clone = _clone(store, group, target, length)
    _redirect(store, state, token, target, clone)
    return clone


@kernel
def extend(store, group, last, token):
    """Append `token` to the sequence that ends in `last`; returns its new end state. Amortised O(1)."""
    nodes = store.nodes
    edge = find(store, last, token)
    if edge != NONE:
        _count(store, last, edge)
        return _target(store, group, last, token, edge)
    new = add_state(store, group, nodes[last].length + 1, NONE)
    state = last
    while edge == NONE:
        add_edge(store, group, state, token, new, 1)
        if nodes[state].link == NONE:
            nodes[new].link = state
            return new
        state = nodes[state].link
        edge = find(store, state, token)
    _count(store, state, edge)
    nodes[new].link = _target(store, group, state, token, edge)
    return new


@kernel
def extend_all(store, group, last, tokens):
    """Append `tokens`, for which the group has reserved space, as `extend` does; returns the new end state."""
    for i in range(tokens.size):
        last = np.int64(extend(store, group, last, np.int64(tokens[i])))
    return last
