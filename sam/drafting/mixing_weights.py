"""The weights by which contexts and the memory of other prompts are mixed, each learnt from what it earned.

The weights start equal and are learnt from every token by online expectation maximisation: a weight moves towards the
share of the actual token's probability that its context brought.
"""

from typing import NamedTuple

import numpy as np

from sam.drafting.calibration import make_acceptance
from sam.drafting.prompt_memory import STRENGTHS
from sam.jit import kernel

LENGTH_BUCKETS, EVIDENCE_BUCKETS, AGE_BUCKETS = 9, 12, 4
SLOWEST = 0.002  # learning rate of a weight that has been learnt for long
PRIOR = 8.0  # updates that the initial weights count for
SUFFIX_WEIGHT, RECOVERY_WEIGHT, MEMORY_WEIGHT = 0.7, 0.3, 0.3  # before anything is learnt

# Weights of suffix contexts are indexed by match length and evidence; from FIRST_RECOVERY on come those of recovery
# contexts, indexed by match length, age and evidence, and from FIRST_OF_MEMORY on those of the memory of other prompts,
# indexed by strength, the group's match length and evidence.
FIRST_RECOVERY = LENGTH_BUCKETS * EVIDENCE_BUCKETS
FIRST_OF_MEMORY = FIRST_RECOVERY + LENGTH_BUCKETS * AGE_BUCKETS * EVIDENCE_BUCKETS
NUM_WEIGHTS = FIRST_OF_MEMORY + STRENGTHS * LENGTH_BUCKETS * EVIDENCE_BUCKETS
MIXING = np.dtype([("weight", "f8"), ("num_updates", "f8")], align=True)


class Learned(NamedTuple):
    """All that drafting learns.

    Attributes:
        mixing: MIXING [contexts], the weights of contexts.
        acceptance: ACCEPTANCE [2, bins + 1], the tables of sam.drafting.calibration.
    """

    mixing: np.ndarray
    acceptance: np.ndarray


def make_learned() -> Learned:
    """Initial weights, and empty tables."""
    mixing = np.zeros(NUM_WEIGHTS, MIXING)
    mixing["weight"][:FIRST_RECOVERY] = SUFFIX_WEIGHT
    mixing["weight"][FIRST_RECOVERY:FIRST_OF_MEMORY] = RECOVERY_WEIGHT
    mixing["weight"][FIRST_OF_MEMORY:] = MEMORY_WEIGHT
    return Learned(mixing, make_acceptance())


@kernel
def length_bucket(length):
    """0, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, more."""
    few = (length > 0) + (length > 1) + (length > 2) + (length > 4)
    return few + (length > 8) + (length > 16) + (length > 32) + (length > 64)


@kernel
def evidence_bucket(count, total):
    """0-4: the only continuation, by its count; 5-6: one of several, seen once or twice; 7-11: by its share."""
    if count == total:
        return 0 if count == 1 else 1 if count == 2 else 2 if count <= 4 else 3 if count <= 9 else 4
    if count <= 2:
        return 4 + count
    return 7 + (5 * count >= total) + (5 * count >= 2 * total) + (5 * count >= 3 * total) + (5 * count >= 4 * total)


@kernel
def memory_weight(continuations, match_len):
    """Index of the weight of the memory of other prompts."""
    evidence = evidence_bucket(continuations.counts[continuations.best], continuations.total)
    bucket = continuations.strength * LENGTH_BUCKETS + length_bucket(match_len)
    return FIRST_OF_MEMORY + bucket * EVIDENCE_BUCKETS + evidence


@kernel
def learn_weight(entry, p, share):
    """Interpolate `share`, of the actual token, into its probability `p`, and learn the weight; returns the mixture."""
    weight, seen = entry.weight, entry.num_updates
    mixed = p + weight * (share - p)
    weight += max(SLOWEST, 1.0 / (seen + PRIOR)) * (weight * share / mixed - weight)
    entry.weight, entry.num_updates = min(0.999, max(0.001, weight)), seen + 1.0
    return mixed
