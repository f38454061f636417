"""Further paths of a batch: where a text may fork, what it would go on with beside the draft."""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE
from sam.drafting.drafter import Drafter
from sam.drafting.paths.forks import grow, make_tree
from sam.jit import compiled, kernel

# The first own token of a further path is right less often than its probability says, since the calibration learns from
# drafts only: in 13 to 15 % of the cases where 17 to 20 % are predicted (7aeeb4c:docs/experiments/several_paths.md).
# Learning goes on from there, as if that had been seen so many times.
RIGHT_SHARE, TIMES_SEEN = 0.7, 20.0
MOST_EXPECTED = 500.0  # first tokens expected to be right, after which what was seen earlier counts half


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

    def own(self, scale: float) -> tuple[np.ndarray, np.ndarray]:
        """Probabilities of the paths' own tokens, and where each path's begin.

        Args:
            scale: of the probabilities (ForkRate).

        Returns:
            float32 [total], int64 [n + 1].
        """
        depth = np.arange(self.tokens.shape[1])
        is_own = (depth >= self.shared[:, None]) & (depth < self.lengths[:, None])
        offsets = np.concatenate([[0], is_own.sum(axis=1).cumsum()])
        return (scale * self.acceptance[is_own]).astype(np.float32), offsets


def further_paths(drafter: Drafter, request_ids: list[str], depths: np.ndarray, paths: int) -> FurtherPaths:
    """Grow a tree for each request, of up to `paths` leaves, and take all of its paths but the likeliest.

    Args:
        drafter: that has drafted for these requests, and been given nothing since.
        depths: int64 [batch], tokens of a path at most; 0: no paths.
        paths: leaves, the draft's included.

    Example:
        >>> drafter = Drafter(max_draft_tokens=2)
        >>> drafter.start("a", np.array([1, 2, 3, 1, 2, 4, 1, 2, 3, 5]))
        >>> drafter.step(["a"], np.array([1, 2]), offsets=[0, 2], budgets=[2]).token_ids
        array([3, 1], dtype=int32)
        >>> found = further_paths(drafter, ["a"], np.array([2]), paths=2)
        >>> found.tokens, found.shared
        (array([[4, 1]], dtype=int32), array([0]))
    """
    slots, depths = drafter.slots_of(request_ids), np.asarray(depths, np.int64)
    most, deepest = len(slots) * (paths - 1), max(1, int(depths.max(initial=0)))
    found = FurtherPaths(
        np.zeros(most, np.int64), np.zeros((most, deepest), np.int32), np.zeros(most, np.int64),
        np.zeros(most, np.int64), np.zeros((most, deepest), np.float32),
    )  # fmt: skip
    tree = make_tree(paths, paths * deepest)
    with drafter.reading():
        read = drafter.store, drafter.memory, drafter.learned, drafter.sequences
        count = _grow_all(*read, slots, depths, tree, paths, found)
    return FurtherPaths(*(array[:count] for array in found))


def warm_up(drafter: Drafter) -> None:
    """Compile every kernel, so that no step waits for it."""
    paths = further_paths(drafter, [], np.zeros(0), 2)
    ForkRate().learn(paths, np.zeros(0, np.int32), paths.lengths, paths.lengths)


@compiled
def _grow_all(store, memory, learned, sequences, slots, depths, tree, paths, found):
    count = 0
    for i in range(slots.size):
        if depths[i] > 0 and sequences.texts[slots[i]].group != NONE:
            grow(store, memory, learned, sequences, slots[i], tree, paths, paths * depths[i], depths[i])
            count = _take_paths(tree, i, found, count)
    return count


@kernel
def _take_paths(tree, request, found, count):
    """Add the tree's paths but the first to those `found`; returns their number."""
    for path in range(1, tree.sizes[2]):
        leaf, first = NONE, NONE
        for i in range(1, tree.sizes[0]):
            if tree.nodes[i].path == path:
                leaf = i
                first = i if first == NONE else first
        found.request[count], found.lengths[count] = request, tree.nodes[leaf].depth
        found.shared[count] = tree.nodes[first].depth - 1
        while leaf > 0:
            node = tree.nodes[leaf]
            found.tokens[count, node.depth - 1] = node.token
            found.acceptance[count, node.depth - 1] = node.acceptance
            leaf = node.parent
        count += 1
    return count


class ForkRate:
    """How often the first own token of a further path is right, as a share of its probability: learnt from the text.

    Only paths whose shared tokens the text has gone on with, and one more, are learnt from, verified or not.
    """

    def __init__(self):
        self._right, self._expected = RIGHT_SHARE * TIMES_SEEN, TIMES_SEEN

    @property
    def scale(self) -> float:
        """By which the probabilities of further paths' own tokens are to be multiplied."""
        return min(1.0, self._right / self._expected)

    def learn(self, paths: FurtherPaths, tokens: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> None:
        """Compare paths with the tokens that have come.

        Args:
            tokens: int32 [total]; those of path i's request are tokens[begins[i]:ends[i]].
        """
        right, expected = _compare(paths.tokens, paths.shared, paths.acceptance, tokens, begins, ends)
        self._right, self._expected = self._right + right, self._expected + expected
        if self._expected > MOST_EXPECTED:
            self._right, self._expected = self._right / 2, self._expected / 2


@compiled
def _compare(tokens, shared, acceptance, text, begins, ends):
    right, expected = 0.0, 0.0
    for i in range(shared.size):
        own = shared[i]
        if begins[i] + own >= ends[i]:
            continue
        agrees = True
        for j in range(own):
            agrees = agrees and tokens[i, j] == text[begins[i] + j]
        if agrees:
            reached = acceptance[i, own - 1] if own > 0 else 1.0
            expected += acceptance[i, own] / max(reached, 1e-9)
            right += tokens[i, own] == text[begins[i] + own]
    return right, expected
