"""Acceptance probabilities of drafts, calibrated by how often earlier drafts were accepted.

A table counts how often draft tokens of a raw probability (that of the draft up to there), at a position of a draft,
were accepted. While a bin has seen little, it is taken to be as right as all drafts together lately: the raw
probability times accepted over expected (empirical Bayes: Efron, Large-Scale Inference, chapter 1). Drafts that were
not verified count too: their tokens are compared with the sampled ones.
"""

import numpy as np

from sam.jit import kernel

# Bins of a table.
POSITIONS = 4
PROBABILITIES = 20
ALL = POSITIONS * PROBABILITIES  # index of the entry for all bins together
PRIOR = 8.0  # observations that a raw probability counts for
OVERALL_PRIOR = 8.0  # tokens, expected and accepted, before there were any
FORGET = 4096.0  # observations after which a bin's older half counts half
OVERALL_FORGET = 64.0  # expected tokens after which the older half of all together counts half

# `expected` is the number of draft tokens in a bin, and the sum of their raw probabilities in the entry for all bins.
ACCEPTANCE = np.dtype([("accepted", "f8"), ("expected", "f8")], align=True)


def make_acceptance() -> np.ndarray:
    """ACCEPTANCE [ALL + 1]: an empty table."""
    return np.zeros(ALL + 1, ACCEPTANCE)


@kernel
def bin_of(position, probability):
    """Index in a table for a draft token at `position` of its draft."""
    return min(position, POSITIONS - 1) * PROBABILITIES + min(PROBABILITIES - 1, int(PROBABILITIES * probability))


@kernel
def acceptance_probability(acceptance, index, probability):
    """Share of the draft tokens with this raw probability that were accepted."""
    overall = acceptance[ALL]
    entry = acceptance[index]
    probability *= min(1.0, (overall.accepted + OVERALL_PRIOR) / (overall.expected + OVERALL_PRIOR))
    return (entry.accepted + PRIOR * probability) / (entry.expected + PRIOR)


@kernel
def add_draft_token(acceptance, sequences, slot, token, probability, min_acceptance):
    """Add `token` to the slot's draft, whose raw cumulative probability with it is `probability`.

    Returns:
        False, with nothing changed, if its cumulative acceptance probability is below `min_acceptance`.
    """
    text = sequences.texts[slot]
    position = text.num_drafted
    index = bin_of(position, probability)
    cumulative = 1.0 if position == 0 else sequences.draft_acceptance[slot, position - 1]
    cumulative = min(cumulative, acceptance_probability(acceptance, index, probability))
    if cumulative < min_acceptance:
        return False
    sequences.draft_tokens[slot, position] = token
    sequences.draft_bins[slot, position] = index
    sequences.draft_acceptance[slot, position] = cumulative
    text.num_drafted += 1
    return True


@kernel
def update_calibration(acceptance, sequences, slot, tokens, first, last):
    """Count which tokens of the last draft the text's new tokens, tokens[first:last], accepted."""
    text = sequences.texts[slot]
    accepted = True
    for i in range(text.num_drafted):
        if accepted and first + i == last:
            break  # the text was cut short: whether this one would have been accepted is not known
        accepted = accepted and sequences.draft_tokens[slot, i] == tokens[first + i]
        index = sequences.draft_bins[slot, i]
        _count(acceptance[index], accepted, 1.0, FORGET)
        expected = (index % PROBABILITIES + 0.5) / PROBABILITIES
        _count(acceptance[ALL], accepted, expected, OVERALL_FORGET)
    text.num_drafted = 0


@kernel
def _count(entry, accepted, expected, forget):
    entry.accepted += accepted
    entry.expected += expected
    if entry.expected >= forget:
        entry.accepted *= 0.5
        entry.expected *= 0.5
