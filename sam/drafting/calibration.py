"""Acceptance probabilities of drafts, calibrated by how often earlier drafts were accepted.

A table counts how often draft tokens of a raw probability (that of the draft up to there), at a position of a draft,
were accepted. While a cell has seen little, it is taken to be as right as all drafts together lately: the raw
probability times accepted over expected. Each cell for itself would have to find out that nothing is accepted where
text does not repeat, and there are eighty of them. (Shrinkage of cells towards a common ratio is empirical Bayes:
Efron, Large-Scale Inference, chapter 1.)

Drafts that were not verified are settled like the others: their tokens are compared with what was sampled.
"""

from __future__ import annotations

from sam.jit import compiled

POSITIONS, BINS = 4, 20
ROWS = POSITIONS * BINS + 1  # of a table: its cells, and all of them together
PRIOR = 8.0  # observations that a raw probability counts for
OVERALL_PRIOR = 8.0  # tokens, expected and accepted, before there were any
FORGET = 4096.0  # observations after which a cell's older half counts half
OVERALL_FORGET = 64.0  # expected tokens after which the older half of all together counts half

# Columns of a sequence: how many drafts are not settled, and from there on each draft's token and, `max_draft_tokens`
# further, its row of the table.
DRAFTED, DRAFTS = 9, 10


@compiled
def cell_of(first, position, probability):
    """Row of a draft token in the table that begins at row `first`."""
    return first + min(position, POSITIONS - 1) * BINS + min(BINS - 1, int(BINS * probability))


@compiled
def acceptance_of(weights, first, cell, probability):
    """How often drafts of this raw probability were accepted."""
    accepted, expected = weights[first + ROWS - 1, 0], weights[first + ROWS - 1, 1]
    probability *= min(1.0, (accepted + OVERALL_PRIOR) / (expected + OVERALL_PRIOR))
    return (weights[cell, 0] + PRIOR * probability) / (weights[cell, 1] + PRIOR)


@compiled
def remember(sequences, row, position, token, cell):
    """Keep a drafted token until it is settled."""
    sequences[row, DRAFTS + position] = token
    sequences[row, DRAFTS + (sequences.shape[1] - DRAFTS) // 2 + position] = cell


@compiled
def settle(weights, first_table, sequences, row, tokens, first, last):
    """Count which of the last drafts the sequence's new tokens, tokens[first:last], accepted; the tables follow each
    other from row `first_table` on."""
    longest = (sequences.shape[1] - DRAFTS) // 2
    alive = True
    for i in range(sequences[row, DRAFTED]):
        if alive and first + i == last:
            break  # the sequence was cut short: what would have become of this one is not known
        alive = alive and sequences[row, DRAFTS + i] == tokens[first + i]
        cell = sequences[row, DRAFTS + longest + i]
        table, place = (cell - first_table) // ROWS, (cell - first_table) % ROWS
        _count(weights, cell, alive, 1.0, FORGET)
        _count(weights, first_table + (table + 1) * ROWS - 1, alive, (place % BINS + 0.5) / BINS, OVERALL_FORGET)
    sequences[row, DRAFTED] = 0


@compiled
def _count(weights, row, accepted, seen, forget):
    weights[row, 0] += accepted
    weights[row, 1] += seen
    if weights[row, 1] >= forget:
        weights[row, 0] *= 0.5
        weights[row, 1] *= 0.5
