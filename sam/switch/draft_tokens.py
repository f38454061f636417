"""Which tokens of the drafts a step verifies, and which further paths beside them, by goodput."""

import numpy as np

from sam.jit import compiled

BINS = 256  # of acceptance, within which tokens count as equal


@compiled
def choose_lengths(acceptance, offsets, requests, cost, min_gain):
    """Choose the draft tokens that maximise expected tokens per millisecond.

    Args:
        acceptance: float32 [total], probabilities of being accepted, falling within each draft.
        offsets: int64 [drafts + 1], where each draft begins.
        requests: requests in the step, each of which brings one token without drafts.
        cost: float64 [n + 1], milliseconds of a step with 0 to n draft tokens, until all ranks are through.
        min_gain: gain in goodput, as a share, below which nothing is verified.

    Returns:
        int64 [drafts], tokens of each; the gain in goodput, as a share; and the draft tokens expected to be accepted.
    """
    count, total = np.zeros(BINS, np.int64), np.zeros(BINS, np.float64)
    for p in acceptance:
        bin_ = min(BINS - 1, int(p * BINS))
        count[bin_] += 1
        total[bin_] += p
    most, drafted, expected = cost.size - 1, 0, 0.0
    plain = requests / cost[0]
    best, best_drafted, best_expected = plain, 0, 0.0
    for bin_ in range(BINS - 1, -1, -1):
        each = total[bin_] / max(1, count[bin_])
        for _ in range(count[bin_]):
            if drafted == most:
                break
            drafted += 1
            expected += each
            goodput = (requests + expected) / cost[drafted]
            if goodput > best:
                best, best_drafted, best_expected = goodput, drafted, expected
    lengths = np.zeros(offsets.size - 1, np.int64)
    if best < (1.0 + min_gain) * plain:
        return lengths, best / plain - 1.0, 0.0
    left, lowest_bin = best_drafted, BINS - 1
    while count[lowest_bin] <= left and lowest_bin > 0:
        left -= count[lowest_bin]
        lowest_bin -= 1
    for i in range(lengths.size):
        for j in range(offsets[i], offsets[i + 1]):
            bin_ = min(BINS - 1, int(acceptance[j] * BINS))
            if bin_ < lowest_bin or (bin_ == lowest_bin and left == 0):
                break
            left -= bin_ == lowest_bin
            lengths[i] += 1
    return lengths, best / plain - 1.0, best_expected


@compiled
def add_rows(acceptance, offsets, overhead, whole, requests, drafted, expected, cost, min_gain):
    """Choose further paths, each a row of its own in the batch, by goodput: those with most expected tokens for each
    token of theirs first.

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
