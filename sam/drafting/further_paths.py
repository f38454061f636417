"""Further paths of a text beside its draft: a tree grown from the automaton, always by its most probable edge.

As Seer (arXiv 2511.14617) and SAM-Decoding (Hu et al., 2024) choose their paths: of all edges that leave the tree, the
one with the highest cumulative probability is added, until the tree has as many tokens as may be verified. A token's
edges are its continuations in the contexts of sam.drafting.context_mixing and in the memory of other prompts, the
likeliest first, so that a tree with one leaf is the draft of the product.
"""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.drafting.context_mixing import Place, end_of, find_contexts, go_on, is_nothing, predict, probability_of
from sam.drafting.drafter import Drafter
from sam.drafting.prompt_memory import CANDIDATES, recall, share_of
from sam.drafting.texts import RECENT_TOKENS, Sequences, acceptance_probability, bin_of, make_sequences
from sam.jit import compiled, kernel

MIN_SHARE = 0.02  # of a context's continuations, below which one is no candidate for a path of its own
# A further path is right less often than its probability says, since the calibration learns from drafts only: in 13 to
# 15 % of the cases where 17 to 20 % are predicted (7aeeb4c:docs/experiments/several_paths.md).
RIGHT_SHARE = 0.7

_PLACE = ("state", "length", "recovery_state", "recovery_match_len", "age")  # sam.drafting.context_mixing.Place
_NODE_INTEGERS = ("token", "parent", "path", "depth", "children", *_PLACE)
# A token of the tree; node 0 is the end of the text. `probability` is raw, and as `acceptance` cumulative.
NODE = np.dtype([*((name, "i8") for name in _NODE_INTEGERS), ("probability", "f8"), ("acceptance", "f8")], align=True)
EDGE = np.dtype([("node", "i8"), ("token", "i8"), ("probability", "f8")], align=True)  # that leaves the tree


class Tree(NamedTuple):
    """Room for a tree."""

    nodes: np.ndarray  # NODE [tokens + 1]
    edges: np.ndarray  # EDGE [nodes * paths], that leave it
    sizes: np.ndarray  # int64 [3], nodes, edges and paths in use
    branch: Sequences  # one slot: the text with the tokens of one path as its draft, for which the memory is asked


def make_tree(paths: int, tokens: int) -> Tree:
    """An empty tree of up to `paths` leaves and `tokens` tokens."""
    return Tree(
        nodes=np.zeros(tokens + 1, NODE),
        edges=np.zeros((tokens + 1) * (paths + 1), EDGE),
        sizes=np.zeros(3, np.int64),
        branch=make_sequences(1, tokens),
    )


@kernel
def grow(store, memory, learned, sequences, slot, tree, paths, most_tokens, depth):
    """Grow the tree of a slot's text: at most `paths` leaves, `most_tokens` tokens, and `depth` tokens on a path."""
    text = sequences.texts[slot]
    root = tree.nodes[0]
    sizes = tree.sizes
    branch = tree.branch.texts[0]
    branch.num_tokens = text.num_tokens
    branch.prompt_tag = text.prompt_tag
    for i in range(RECENT_TOKENS):
        tree.branch.recent_tokens[0, i] = sequences.recent_tokens[slot, i]
    root.token = root.parent = NONE
    root.path = root.depth = root.children = 0
    root.probability = root.acceptance = 1.0
    _set_place(root, end_of(store, text))
    sizes[0] = 1
    sizes[1] = 0
    sizes[2] = 1
    _add_edges(store, memory, learned, tree, 0, paths)
    while sizes[0] <= most_tokens:
        best = NONE
        for i in range(sizes[1]):
            edge = tree.edges[i]
            node = tree.nodes[edge.node]
            if edge.token == NONE or node.depth == depth or (node.children > 0 and sizes[2] == paths):
                continue
            if best == NONE or edge.probability > tree.edges[best].probability:
                best = i
        if best == NONE:
            return
        _add_node(store, memory, learned, tree, best, paths)


@kernel
def _place(node):
    return Place(node.state, node.length, node.recovery_state, node.recovery_match_len, node.age)


@kernel
def _set_place(node, place):
    node.state = place.state
    node.length = place.length
    node.age = place.age
    node.recovery_state = place.recovery_state
    node.recovery_match_len = place.recovery_match_len


@kernel
def _recall(memory, tree, at):
    """What the memory of other prompts has seen to follow the text and the path to a node."""
    depth = tree.nodes[at].depth
    node = at
    while node > 0:
        tree.branch.draft_tokens[0, tree.nodes[node].depth - 1] = tree.nodes[node].token
        node = tree.nodes[node].parent
    return recall(memory, tree.branch, 0, depth)


@kernel
def _add_edges(store, memory, learned, tree, at, paths):
    """The node's `paths` likeliest continuations, of which the first is the one that the product drafts."""
    node = tree.nodes[at]
    first = tree.sizes[1]
    mixing = learned.mixing
    contexts, match_len = find_contexts(store, _place(node))
    recalled = _recall(memory, tree, at)
    if is_nothing(contexts, match_len, recalled):
        return
    token, most = predict(store, mixing, contexts, match_len, recalled)
    _add_edge(tree, at, token, node.probability * most)
    if paths == 1:
        return
    sums = contexts, match_len, recalled
    for i in range(CANDIDATES if recalled.total != 0 else 0):
        token = np.int64(recalled.tokens[i])
        _offer(store, mixing, sums, tree, first, paths, at, token, share_of(recalled, token), most)
    for context in contexts:
        state = np.int64(context.state)
        edge = state
        while edge != NONE:
            token = np.int64(store.nodes[edge].token)
            share = store.nodes[edge].count / store.nodes[state].total_count
            _offer(store, mixing, sums, tree, first, paths, at, token, share, most)
            edge = np.int64(store.nodes[edge].first_extra_edge if edge == state else store.nodes[edge].next_edge)


@kernel
def _offer(store, mixing, sums, tree, first, paths, at, token, share, most):
    """Add an edge, or replace the node's least likely one but the first, if `paths` begin at its edge `first`."""
    if share < MIN_SHARE:
        return
    edges = tree.edges
    end = tree.sizes[1]
    for i in range(first, end):
        if edges[i].token == token:
            return
    # No more likely than the first, which stays the product's also where all contexts' seconds agree.
    p = tree.nodes[at].probability * min(most, probability_of(store, mixing, sums[0], sums[1], sums[2], token))
    if end - first < paths:
        _add_edge(tree, at, token, p)
        return
    least = first + 1
    for i in range(first + 2, end):
        if edges[i].probability < edges[least].probability:
            least = i
    if p > edges[least].probability:
        edges[least].token = token
        edges[least].probability = p


@kernel
def _add_edge(tree, at, token, probability):
    edge = tree.edges[tree.sizes[1]]
    edge.node = at
    edge.token = token
    edge.probability = probability
    tree.sizes[1] += 1


@kernel
def _add_node(store, memory, learned, tree, at, paths):
    """Add the edge's token to the tree, and the edges that leave from there."""
    edge = tree.edges[at]
    sizes = tree.sizes
    parent = tree.nodes[edge.node]
    node = tree.nodes[sizes[0]]
    node.token = edge.token
    node.parent = edge.node
    node.depth = parent.depth + 1
    node.children = 0
    node.path = parent.path if parent.children == 0 else sizes[2]
    sizes[2] += parent.children > 0
    parent.children += 1
    index = bin_of(parent.depth, edge.probability)
    node.probability = edge.probability
    node.acceptance = acceptance_probability(learned.acceptance, index, edge.probability)
    node.acceptance = min(node.acceptance, parent.acceptance)
    contexts, _ = find_contexts(store, _place(parent))
    _set_place(node, go_on(store, contexts, _place(parent), edge.token))
    edge.token = NONE
    sizes[0] += 1
    _add_edges(store, memory, learned, tree, sizes[0] - 1, paths)


class FurtherPaths(NamedTuple):
    """Paths beside the drafts of a batch, those of a request in the order in which its tree grew.

    Attributes:
        request: int64 [n], place in the batch of each path's request, rising.
        tokens: int32 [n, depth], from the end of the text on.
        lengths: int64 [n], tokens of each path.
        shared: int64 [n], tokens at its beginning that an earlier path or the draft has too.
        acceptance: float32 [n, depth], cumulative acceptance probabilities.
    """

    request: np.ndarray
    tokens: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray
    acceptance: np.ndarray

    def own(self) -> tuple[np.ndarray, np.ndarray]:
        """float32 [total], probabilities of the paths' own tokens, and int64 [n + 1], where each path's begin."""
        depth = np.arange(self.tokens.shape[1])
        is_own = (depth >= self.shared[:, None]) & (depth < self.lengths[:, None])
        offsets = np.concatenate([[0], is_own.sum(axis=1).cumsum()])
        return (RIGHT_SHARE * self.acceptance[is_own]).astype(np.float32), offsets


def further_paths(drafter: Drafter, request_ids: list[str], depths: np.ndarray, paths: int) -> FurtherPaths:
    """Grow a tree for each request, of up to `paths` leaves, and take all of its paths but the likeliest.

    Args:
        drafter: that has drafted for these requests, and been given nothing since.
        depths: int64 [batch], tokens of a path at most; 0: no paths.
        paths: leaves, the draft's included.
    """
    slots = drafter.slots_of(request_ids)
    depths = np.asarray(depths, np.int64)
    most = len(slots) * (paths - 1)
    deepest = max(1, int(depths.max(initial=0)))
    room = FurtherPaths(
        request=np.zeros(most, np.int64),
        tokens=np.zeros((most, deepest), np.int32),
        lengths=np.zeros(most, np.int64),
        shared=np.zeros(most, np.int64),
        acceptance=np.zeros((most, deepest), np.float32),
    )
    tree = make_tree(paths, paths * deepest)
    with drafter.reading():
        read = drafter.store, drafter.memory, drafter.learned, drafter.sequences
        count = _grow_all(*read, slots, depths, tree, paths, room)
    return FurtherPaths(*(array[:count] for array in room))


@compiled
def _grow_all(store, memory, learned, sequences, slots, depths, tree, paths, room):
    """Fill `room` (FurtherPaths) with the paths of all slots; returns their number."""
    count = 0
    for i in range(slots.size):
        if depths[i] > 0 and sequences.texts[slots[i]].group != NONE:
            grow(store, memory, learned, sequences, slots[i], tree, paths, paths * depths[i], depths[i])
            count = _take_paths(tree, i, room, count)
    return count


@kernel
def _take_paths(tree, request, room, count):
    """Add the tree's paths but the first to the `count` that are in `room`; returns their number."""
    for path in range(1, tree.sizes[2]):
        first = NONE
        leaf = NONE
        for i in range(1, tree.sizes[0]):
            if tree.nodes[i].path == path:
                first = i if first == NONE else first
                leaf = i
        room.request[count] = request
        room.lengths[count] = tree.nodes[leaf].depth
        room.shared[count] = tree.nodes[first].depth - 1
        while leaf > 0:
            node = tree.nodes[leaf]
            room.tokens[count, node.depth - 1] = node.token
            room.acceptance[count, node.depth - 1] = node.acceptance
            leaf = node.parent
        count += 1
    return count
