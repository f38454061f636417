"""Counted, generalised, online suffix automata in blocks of nodes of one store, which all groups share.

Blumer et al. (1985) give the construction; here several sequences grow interleaved, each with its own end state, and
transitions are counted. A token is counted in the longest context in which it had been seen before, and begins with
one in every longer context; shorter ones are left alone. Data compression calls this update exclusion (Moffat, 1990);
on recordings it predicts better than counting in all contexts, and ends the walk along the suffix links early.

A suffix automaton of t tokens has at most 2t states and 3t edges, also of several sequences (Blumer et al., 1987). Most
states have one edge, so a state's node holds the first one, and only extra edges have nodes of their own, of which
there are at most t. A block of 3 x `BLOCK_TOKENS` nodes thus holds that many tokens of any one sequence. Sequences that
branch off one prompt may have more edges: behind a prompt that ends in one token many times over, each first token of a
sample is an edge of every suffix of that. Then the group takes a further block in the middle of a token. Blocks go back
when a group is dropped: nothing is ever copied, so no step waits for growth, and memory costs nothing until touched.

The edges that a state has beyond its first are found in a hash table, linear hashing (Litwin, 1980): one bucket is
split for each edge added, so the table follows their number without a pause. The edges of a bucket are a chain through
their nodes. Those of a dropped group leave the table when their block is taken again, from its last block to the first:
an edge is never in an earlier block than its state, so no state comes back while the table has edges of its past.
"""

from typing import NamedTuple

import numpy as np

from sam.jit import kernel, rare_kernel

NONE = -1
IN_TABLE = -2  # first_extra_edge of an extra edge's node
BLOCK_TOKENS = 32
BLOCK_NODES = 3 * BLOCK_TOKENS


def integers(*names: str) -> np.dtype:
    """A record of int64."""
    return np.dtype([(name, "i8") for name in names], align=True)


def overlapping(offsets: dict[str, int], formats: list[str], size: int) -> np.dtype:
    """A record of `size` bytes, of which some fields share bytes."""
    fields = {"names": list(offsets), "formats": formats, "offsets": list(offsets.values()), "itemsize": size}
    return np.dtype(fields, align=True)


def aligned_memory(size: int, alignment: int) -> np.ndarray:
    """uint8 [size], not cleared: numpy asks for huge pages where it need not clear memory; without them every look-up
    misses the TLB."""
    memory = np.empty(size + alignment, dtype=np.uint8)
    first = -memory.ctypes.data % alignment
    return memory[first : first + size]


# A node is a state with its first edge, or an extra edge; no node straddles two cache lines. An edge is named by its
# node, so a state's first edge has the state's own name. The last three fields overlap the first three.
_NODE_OFFSETS = {
    "length": 0,  # of the state's longest string
    "link": 4,  # suffix link
    "total_count": 8,  # sum over the state's edges; 0: it has none
    "argmax_edge": 12,  # the most frequent edge, of equals the latest
    "first_extra_edge": 16,
    "token": 20,  # of the edge, as the next two
    "target": 24,
    "count": 28,
    "source": 0,  # of an extra edge: its state
    "next_edge": 4,  # the state's next extra edge
    "hash_next": 8,  # the next edge in the hash bucket
}
NODE = overlapping(_NODE_OFFSETS, ["i4"] * len(_NODE_OFFSETS), 32)
GROUP = integers(
    "first_block",
    "last_block",
    "num_blocks",  # reserved
    "taken_blocks",  # of them, those that are written in
    "nodes_in_last_block",
    "num_tokens",
)
COUNTERS = integers(
    "num_buckets",
    "base_buckets",  # the largest power of two not above num_buckets
    "num_hashed_edges",
    "num_touched_blocks",  # ever taken
    "dropped_block",  # to take next, NONE if there is none
    "num_used_blocks",  # reserved by live groups
    "torn_group",  # that got no further block in the middle of a token, and is not to be read again
)

BLOCK_BYTES = BLOCK_NODES * NODE.itemsize + 4 * BLOCK_TOKENS + GROUP.itemsize + 8


class Store(NamedTuple):
    """Arrays for a fixed number of blocks, and for as many groups."""

    nodes: np.ndarray  # NODE [blocks * BLOCK_NODES]
    hash_buckets: np.ndarray  # int32 [blocks * BLOCK_TOKENS], first edge of each bucket
    groups: np.ndarray  # GROUP [blocks]
    blocks: np.ndarray  # int64 [blocks], the block before each in its group, or the one dropped before
    counters: np.ndarray  # COUNTERS [1]


def make_store(blocks: int) -> Store:
    """An empty store, whose memory is not touched; ValueError: no block, or more than 32-bit indices can name."""
    most = np.iinfo(np.int32).max // BLOCK_NODES
    if not 1 <= blocks <= most:
        raise ValueError(f"a budget of {blocks * BLOCK_BYTES} bytes: expected {BLOCK_BYTES} to {most * BLOCK_BYTES}")
    store = Store(
        nodes=aligned_memory(blocks * BLOCK_NODES * NODE.itemsize, NODE.itemsize).view(NODE),
        hash_buckets=np.empty(blocks * BLOCK_TOKENS, dtype=np.int32),
        groups=np.zeros(blocks, dtype=GROUP),
        blocks=np.zeros(blocks, dtype=np.int64),
        counters=np.zeros(1, dtype=COUNTERS),
    )
    store.hash_buckets[0] = NONE
    store.counters["num_buckets"] = store.counters["base_buckets"] = 1
    store.counters["dropped_block"] = store.counters["torn_group"] = NONE
    return store


def blocks_for(tokens: int) -> int:
    """Blocks that hold any `tokens` tokens and the root."""
    return -(-(tokens + 1) // BLOCK_TOKENS)


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
    counters = store.counters[0]
    new = counters.num_buckets
    old = new - counters.base_buckets
    edge = store.hash_buckets[old]
    kept = NONE
    moved = NONE
    while edge != NONE:
        node = store.nodes[edge]
        rest = node.hash_next
        if np.int64(edge_hash(node.source, node.token) & np.uint64(2 * counters.base_buckets - 1)) == new:
            node.hash_next = moved
            moved = edge
        else:
            node.hash_next = kept
            kept = edge
        edge = rest
    store.hash_buckets[old] = kept
    store.hash_buckets[new] = moved
    counters.num_buckets += 1
    if counters.num_buckets == 2 * counters.base_buckets:
        counters.base_buckets = counters.num_buckets


@kernel
def add_to_table(store, edge):
    """Put in an extra edge, whose node has its source and token."""
    counters = store.counters[0]
    node = store.nodes[edge]
    counters.num_hashed_edges += 1
    # There may be more extra edges than tokens: chains then grow, the table does not.
    if counters.num_hashed_edges > counters.num_buckets and counters.num_buckets < store.hash_buckets.size:
        _split_bucket(store)
    bucket = bucket_of(store, edge_hash(node.source, node.token))
    node.hash_next = store.hash_buckets[bucket]
    store.hash_buckets[bucket] = edge


@kernel
def remove_from_table(store, edge):
    """Take out an extra edge that is in the table."""
    nodes = store.nodes
    node = store.nodes[edge]
    bucket = bucket_of(store, edge_hash(node.source, node.token))
    before = store.hash_buckets[bucket]
    if before == edge:
        store.hash_buckets[bucket] = node.hash_next
    else:
        while nodes[before].hash_next != edge:
            before = nodes[before].hash_next
        nodes[before].hash_next = node.hash_next
    store.counters[0].num_hashed_edges -= 1


@rare_kernel
def _take_block(store, group):
    """Go on writing in a clean block, dropped ones first. All but those in the middle of a token have been reserved."""
    counters = store.counters[0]
    entry = store.groups[group]
    if entry.taken_blocks == entry.num_blocks:
        if counters.num_used_blocks == store.blocks.size:
            counters.torn_group = group
            raise MemoryError("no block is left in the middle of a token")
        entry.num_blocks += 1
        counters.num_used_blocks += 1
    block = counters.dropped_block
    if block == NONE:
        block = counters.num_touched_blocks
        counters.num_touched_blocks += 1
    else:
        counters.dropped_block = store.blocks[block]
        for i in range(block * BLOCK_NODES, (block + 1) * BLOCK_NODES):
            if store.nodes[i].first_extra_edge == IN_TABLE:
                remove_from_table(store, i)
    for i in range(block * BLOCK_NODES, (block + 1) * BLOCK_NODES):
        store.nodes[i].first_extra_edge = NONE  # memory may hold IN_TABLE by chance
    store.blocks[block] = entry.last_block
    entry.last_block = block
    entry.taken_blocks += 1
    entry.nodes_in_last_block = 0


@kernel
def _new_node(store, group):
    entry = store.groups[group]
    if entry.nodes_in_last_block == BLOCK_NODES:
        _take_block(store, group)
    entry.nodes_in_last_block += 1
    return entry.last_block * BLOCK_NODES + entry.nodes_in_last_block - 1


@kernel
def add_group(store, group):
    """Make `group` an automaton of no tokens, with the root as its only state; returns the root. A block is free."""
    entry = store.groups[group]
    entry.num_blocks = entry.taken_blocks = entry.num_tokens = 0
    entry.last_block = NONE
    entry.nodes_in_last_block = BLOCK_NODES
    root = add_state(store, group, 0, NONE)
    entry.first_block = entry.last_block
    return root


@kernel
def reserve(store, group, tokens):
    """Reserve space for `tokens` more and count them; False, with nothing changed, if blocks are short."""
    entry = store.groups[group]
    counters = store.counters[0]
    missing = max(0, (entry.num_tokens + tokens + BLOCK_TOKENS) // BLOCK_TOKENS - entry.num_blocks)
    if missing > store.blocks.size - counters.num_used_blocks:
        return False
    entry.num_blocks += missing
    counters.num_used_blocks += missing
    entry.num_tokens += tokens
    return True


@kernel
def drop_group(store, group):
    """Give back the blocks of `group`, at once whatever its size."""
    entry = store.groups[group]
    counters = store.counters[0]
    store.blocks[entry.first_block] = counters.dropped_block
    counters.dropped_block = entry.last_block
    counters.num_used_blocks -= entry.num_blocks
    entry.num_blocks = entry.num_tokens = 0


@kernel
def add_state(store, group, length, link):
    """A new state without edges."""
    state = _new_node(store, group)
    node = store.nodes[state]
    node.length = length
    node.link = link
    node.total_count = node.count = 0
    node.argmax_edge = node.first_extra_edge = NONE
    return state


@kernel
def add_edge(store, group, state, token, target, count):
    """Give `state` an edge that it does not have yet; returns it."""
    nodes = store.nodes
    source = store.nodes[state]
    edge = np.int64(state)
    if source.total_count != 0:
        edge = _new_node(store, group)
        nodes[edge].source = state
        nodes[edge].next_edge = source.first_extra_edge
        nodes[edge].first_extra_edge = IN_TABLE
        source.first_extra_edge = edge
    nodes[edge].token = token
    nodes[edge].target = target
    nodes[edge].count = count
    source.total_count += count
    if source.argmax_edge == NONE or count >= nodes[source.argmax_edge].count:
        source.argmax_edge = edge
    if edge != state:
        add_to_table(store, edge)
    return edge


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
    edge = np.int64(original if nodes[original].total_count else NONE)
    argmax_edge = NONE  # of the clone
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
