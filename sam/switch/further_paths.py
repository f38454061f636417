"""Which further paths a step verifies, beside the drafts: each is a row of its own in the batch."""

import numpy as np

from sam.jit import compiled


@compiled
def add_rows(acceptance, offsets, overhead, whole, requests, drafted, expected, cost, min_gain):
    """Choose further paths by goodput, those with most expected tokens for each token of theirs first.

    Args:
        acceptance: float32 [total], cumulative acceptance probabilities of the paths' own tokens.
        offsets: int64 [paths + 1], where each path's begin.
        overhead: int64 [paths], tokens of a row beside its own: the last sampled one, and what it shares.
        whole: tokens of every row, whatever is taken of its path; 0: as many as are taken.
        requests, drafted, expected: requests of the step, and its draft tokens and how many of them are expected to be
            accepted, without further paths.
        cost: float64 [n + 1], milliseconds of a step with 0 to n draft tokens.
        min_gain: share by which a path must raise expected tokens per millisecond.

    Returns:
        int64 [paths], own tokens taken of each; and the draft tokens expected in all.
    """
    paths = offsets.size - 1
    ratio, gain = np.zeros(paths), np.zeros(paths)
    tokens, taken, chosen = np.zeros(paths, np.int64), np.zeros(paths, np.int64), np.zeros(paths, np.int64)
    for i in range(paths):
        total = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            total += acceptance[j]
            own = j + 1 - offsets[i]
            row = whole if whole else overhead[i] + own
            if total / row > ratio[i]:
                ratio[i], gain[i], tokens[i], taken[i] = total / row, total, row, own
    for i in np.argsort(-ratio):
        after = drafted + tokens[i]
        if taken[i] == 0 or after >= cost.size:
            continue
        if (requests + expected + gain[i]) / cost[after] > (1.0 + min_gain) * (requests + expected) / cost[drafted]:
            chosen[i], drafted, expected = taken[i], after, expected + gain[i]
    return chosen, expected
