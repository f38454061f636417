"""A hash table of the edges that a state has beyond its first, by state and token.

Linear hashing (Litwin, 1980): one bucket is split for each edge added, so the table follows their number without a
pause. The edges of a bucket are a chain through their nodes; all arrays are those of a `sam.automaton.store.Store`.
"""

import numpy as np

from sam.jit import kernel

NONE = -1
IN_TABLE = -2  # first_extra_edge of an extra edge's node


@kernel
def edge_hash(state, token):
    """uint64."""
    h = (np.uint64(state) * np.uint64(0x9E3779B97F4A7C15)) ^ (np.uint64(token) * np.uint64(0xC2B2AE3D27D4EB4F))
    return h ^ (h >> np.uint64(29))


@kernel
def bucket_of(store, hashed):
    """The bucket of an edge by its `edge_hash`."""
    counters = store.counters[0]
    bucket = np.int64(hashed & np.uint64(2 * counters.base_buckets - 1))
    return bucket if bucket < counters.num_buckets else bucket - counters.base_buckets


@kernel
def find(store, state, token):
    """The edge of `state` by `token`, or NONE."""
    nodes = store.nodes
    if nodes[state].total_count == 0:
        return NONE
    if nodes[state].token == token:
        return state
    if nodes[state].first_extra_edge == NONE:
        return NONE
    edge = np.int64(store.hash_buckets[bucket_of(store, edge_hash(state, token))])
    while edge != NONE and (nodes[edge].source != state or nodes[edge].token != token):
        edge = np.int64(nodes[edge].hash_next)
    return edge


@kernel
def _split_bucket(store):
    nodes, counters = store.nodes, store.counters[0]
    new = counters.num_buckets
    old = new - counters.base_buckets
    edge, kept, moved = store.hash_buckets[old], NONE, NONE
    while edge != NONE:
        node = nodes[edge]
        rest = node.hash_next
        if np.int64(edge_hash(node.source, node.token) & np.uint64(2 * counters.base_buckets - 1)) == new:
            node.hash_next = moved
            moved = edge
        else:
            node.hash_next = kept
            kept = edge
        edge = rest
    store.hash_buckets[old], store.hash_buckets[new] = kept, moved
    counters.num_buckets += 1
    if counters.num_buckets == 2 * counters.base_buckets:
        counters.base_buckets = counters.num_buckets


@kernel
def add(store, edge):
    """Put in an extra edge, whose node has its source and token."""
    counters, node = store.counters[0], store.nodes[edge]
    counters.num_hashed_edges += 1
    # Sequences that branch off one prompt may have more extra edges than tokens: chains then grow, the table does not.
    if counters.num_hashed_edges > counters.num_buckets and counters.num_buckets < store.hash_buckets.size:
        _split_bucket(store)
    bucket = bucket_of(store, edge_hash(node.source, node.token))
    node.hash_next = store.hash_buckets[bucket]
    store.hash_buckets[bucket] = edge


@kernel
def remove(store, edge):
    """Take out an extra edge that is in the table."""
    nodes, node = store.nodes, store.nodes[edge]
    bucket = bucket_of(store, edge_hash(node.source, node.token))
    before = store.hash_buckets[bucket]
    if before == edge:
        store.hash_buckets[bucket] = node.hash_next
    else:
        while nodes[before].hash_next != edge:
            before = nodes[before].hash_next
        nodes[before].hash_next = node.hash_next
    store.counters[0].num_hashed_edges -= 1
