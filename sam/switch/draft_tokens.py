"""Which tokens of the drafts a step verifies, by goodput."""

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
