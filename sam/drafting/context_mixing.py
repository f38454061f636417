"""What follows a text: the contexts of a suffix automaton weighed by how often each has been right.

Three things decide on a draft token.

- The longest suffixes of the text that were continued before, `CONTEXTS` of them. Their continuations' shares are
  interpolated from the shortest context to the longest, as in prediction by partial matching (Cleary and Witten,
  1984); the weight of a context depends on its length and on the evidence in it.
- The substitution context. Where the text departed from what was predicted ("= 12" instead of "= 15"), it often goes on
  as if it had not: the state that the predicted token leads to is followed beside the text, and its continuation joins
  the interpolation. Compressors call this the recovery of a match model.
- How often earlier drafts were accepted, by which raw probabilities are calibrated (sam.drafting.calibration).

The weights start equal and are learnt from every token by online expectation maximisation: a weight moves towards the
share of the actual token's probability that its context brought. Nothing depends on time or on chance: the same calls
give the same drafts on every rank.
"""

from __future__ import annotations

import numpy as np

from sam.automaton.store import BEST, COUNT, LENGTH, LINK, NONE, TARGET, TOKEN, TOTAL, find
from sam.drafting import calibration
from sam.drafting.calibration import DRAFTED, DRAFTS, acceptance_of, cell_of, remember
from sam.jit import compiled

CONTEXTS = 2
LENGTH_BUCKETS, EVIDENCE_BUCKETS, AGES = 9, 12, 4
FLOOR = 1e-5  # probability of a token that no context knows
SLOWEST = 0.002  # learning rate of a weight that has been learnt for long
PRIOR = 8.0  # observations that the initial weights count for
CONTEXT_WEIGHT, BESIDE_WEIGHT = 0.7, 0.3  # before anything is learnt

# Rows of the table of weights: of ordinary contexts, by match length and evidence; of substitution contexts, by match
# length, age and evidence; the calibration of drafts from the group and of those from a corpus. Its columns: a weight
# or number of successes, and the observations.
BESIDE_ROWS = LENGTH_BUCKETS * EVIDENCE_BUCKETS
ACCEPTED_ROWS = BESIDE_ROWS + LENGTH_BUCKETS * AGES * EVIDENCE_BUCKETS
CORPUS_ROWS = ACCEPTED_ROWS + calibration.ROWS
WEIGHT_ROWS = CORPUS_ROWS + calibration.ROWS

# Columns of a sequence: its group, end state, tokens; substitution context (state, match length, tokens it has been
# right since the last substitution, substitutions before that); match in the corpus (state, length); drafts that are
# not settled (sam.drafting.calibration).
GROUP, END, NUM_TOKENS, BESIDE, BESIDE_LENGTH, BESIDE_AGE, BESIDE_SUBSTITUTIONS = range(7)
CORPUS_STATE, CORPUS_LENGTH = range(7, DRAFTED)

# Rows of the room to work in: states of the contexts, the substitution context first and the shortest last, their rows
# of weights and best continuations.
STATES, ROWS, TOKENS = range(3)


def make_sequences(count: int, max_draft_tokens: int) -> np.ndarray:
    """int64 [count, DRAFTS + 2 * max_draft_tokens]."""
    return np.zeros((count, DRAFTS + 2 * max_draft_tokens), np.int64)


def make_weights() -> np.ndarray:
    """float64 [WEIGHT_ROWS, 2]."""
    weights = np.zeros((WEIGHT_ROWS, 2))
    weights[:BESIDE_ROWS, 0] = CONTEXT_WEIGHT
    weights[BESIDE_ROWS:ACCEPTED_ROWS, 0] = BESIDE_WEIGHT
    return weights


def make_room() -> np.ndarray:
    """int64 [3, CONTEXTS + 1]."""
    return np.zeros((3, CONTEXTS + 1), np.int64)


@compiled
def start(sequences, row, group, end, tokens):
    sequences[row, GROUP], sequences[row, END], sequences[row, NUM_TOKENS] = group, end, tokens
    sequences[row, BESIDE] = NONE
    sequences[row, CORPUS_STATE] = sequences[row, CORPUS_LENGTH] = sequences[row, DRAFTED] = 0


@compiled
def _length_bucket(length):
    """0, 1, 2, 3-4, 5-8, 9-16, 17-32, 33-64, more."""
    few = (length > 0) + (length > 1) + (length > 2) + (length > 4)
    return few + (length > 8) + (length > 16) + (length > 32) + (length > 64)


@compiled
def _evidence_bucket(count, total):
    """Whether the best continuation was the only one, and how often it or what share of all it was seen."""
    if count == total:
        return 0 if count == 1 else 1 if count == 2 else 2 if count <= 4 else 3 if count <= 9 else 4
    if count <= 2:
        return 4 + count
    return 7 + (5 * count >= total) + (5 * count >= 2 * total) + (5 * count >= 3 * total) + (5 * count >= 4 * total)


@compiled
def match_length(records, sequences, row):
    """Length of the longest suffix of a sequence that has been continued before."""
    state = sequences[row, END]
    while state != NONE and records[state, TOTAL] == 0:
        state = np.int64(records[state, LINK])
    return np.int64(records[state, LENGTH]) if state != NONE else np.int64(0)


@compiled
def _put(records, room, place, state, row):
    best = records[state, BEST]
    evidence = _evidence_bucket(records[best, COUNT], records[state, TOTAL])
    room[STATES, place], room[ROWS, place] = state, row * EVIDENCE_BUCKETS + evidence
    room[TOKENS, place] = records[best, TOKEN]


@compiled
def _contexts(records, room, state, length, beside, beside_length, beside_age):
    """Fill `room` with the substitution context, if it has a longer match than the text itself, and the longest
    suffixes with a continuation.

    Args:
        state, length: the text's longest repeated suffix; the state may have longer strings as well.

    Returns:
        How many there are, the length of the longest suffix with a continuation, which may be empty, and where it is.
    """
    while state != NONE and records[state, TOTAL] == 0:
        state = np.int64(records[state, LINK])
        length = np.int64(records[state, LENGTH]) if state != NONE else np.int64(0)
    found, longest = 0, length
    if beside != NONE and beside_length > length and records[beside, TOTAL] != 0:
        row = _length_bucket(beside_length) * AGES + min(beside_age, AGES - 1)
        _put(records, room, 0, beside, BESIDE_ROWS // EVIDENCE_BUCKETS + row)
        found = 1
    first = found
    while state != NONE and found < first + CONTEXTS:
        _put(records, room, found, state, _length_bucket(length))
        found += 1
        state = np.int64(records[state, LINK])
        length = np.int64(records[state, LENGTH]) if state != NONE else np.int64(0)
    return found, longest, first


@compiled
def _share(records, heads, sizes, state, token):
    """How much of what followed `state` was `token`."""
    edge = np.int64(records[state, BEST])
    if records[edge, TOKEN] != token:
        edge = find(records, heads, sizes, state, token)
        if edge == NONE:
            return 0.0
    return records[edge, COUNT] / records[state, TOTAL]


@compiled
def _probability(records, heads, sizes, weights, room, contexts, token):
    """The contexts' shares of `token`, interpolated from the shortest to the substitution context."""
    p = FLOOR
    for i in range(contexts - 1, -1, -1):
        share = _share(records, heads, sizes, room[STATES, i], token)
        p += weights[room[ROWS, i], 0] * (share - p)
    return p


@compiled
def _predict(records, heads, sizes, weights, room, contexts):
    """The likeliest of the contexts' best continuations, and its raw probability."""
    likeliest, probability, left = np.int64(NONE), 0.0, 1.0
    for i in range(contexts):
        token = room[TOKENS, i]
        new = True
        for j in range(i):
            new &= room[TOKENS, j] != token
        if new:
            p = _probability(records, heads, sizes, weights, room, contexts, token)
            if p > probability:
                likeliest, probability = token, p
            left -= p
            if left < probability:
                break  # no other token can be likelier
    return likeliest, probability


@compiled
def learn(records, heads, sizes, weights, room, sequences, row, token):
    """Learn from `token`, which follows the sequence and is not yet appended."""
    end = sequences[row, END]
    beside, length, age = sequences[row, BESIDE], sequences[row, BESIDE_LENGTH], sequences[row, BESIDE_AGE]
    contexts, match, longest = _contexts(records, room, end, np.int64(records[end, LENGTH]), beside, length, age)
    p = FLOOR
    for i in range(contexts - 1, -1, -1):
        share, cell = _share(records, heads, sizes, room[STATES, i], token), room[ROWS, i]
        weight, seen = weights[cell, 0], weights[cell, 1]
        mixed = p + weight * (share - p)
        weight += max(SLOWEST, 1.0 / (seen + PRIOR)) * (weight * share / mixed - weight)
        weights[cell, 0], weights[cell, 1] = min(0.999, max(0.001, weight)), seen + 1.0
        p = mixed
    sequences[row, BESIDE] = _follow(records, heads, sizes, sequences, row, token) if longest == 1 else NONE
    if match > 0 and sequences[row, BESIDE] == NONE and room[TOKENS, longest] != token:
        sequences[row, BESIDE] = records[records[room[STATES, longest], BEST], TARGET]
        sequences[row, BESIDE_LENGTH] = match + 1
        sequences[row, BESIDE_AGE] = sequences[row, BESIDE_SUBSTITUTIONS] = 0


@compiled
def _follow(records, heads, sizes, sequences, row, token):
    """The substitution context after `token`, which it may take for one more substitution."""
    beside = sequences[row, BESIDE]
    edge = find(records, heads, sizes, beside, token)
    if edge != NONE:
        sequences[row, BESIDE_LENGTH] += 1
        sequences[row, BESIDE_AGE] += 1
        return np.int64(records[edge, TARGET])
    if sequences[row, BESIDE_SUBSTITUTIONS] == 1:
        return np.int64(NONE)
    sequences[row, BESIDE_SUBSTITUTIONS] += 1
    sequences[row, BESIDE_AGE] = 0
    return np.int64(records[records[beside, BEST], TARGET])


@compiled
def _after(records, heads, sizes, state, length, token):
    """The text's longest repeated suffix when `token`, which some context knows, follows: a state and a length."""
    edge = find(records, heads, sizes, state, token)
    while edge == NONE:
        state = np.int64(records[state, LINK])
        if state == NONE:
            return np.int64(NONE), np.int64(0)
        length = np.int64(records[state, LENGTH])
        edge = find(records, heads, sizes, state, token)
    return np.int64(records[edge, TARGET]), length + 1


@compiled
def draft(records, heads, sizes, weights, room, sequences, row, budget, min_acceptance, tokens, acceptance):
    """Write up to `budget` draft tokens into `tokens`, and into `acceptance` their cumulative acceptance probabilities,
    none below `min_acceptance`; returns the number of tokens, and the length of the match drafted from."""
    state = sequences[row, END]
    length = np.int64(records[state, LENGTH])
    beside, beside_length, age = sequences[row, BESIDE], sequences[row, BESIDE_LENGTH], sequences[row, BESIDE_AGE]
    first_match, drafted, raw, alive = np.int64(0), 0, 1.0, 1.0
    while drafted < budget and state != NONE:
        contexts, match, first = _contexts(records, room, state, length, beside, beside_length, age)
        if match == 0 and first == 0:
            break  # only the empty suffix is left, and the likeliest token of all is seldom right
        token, probability = _predict(records, heads, sizes, weights, room, contexts)
        raw *= probability
        cell = cell_of(ACCEPTED_ROWS, drafted, raw)
        alive = min(alive, acceptance_of(weights, ACCEPTED_ROWS, cell, raw))
        if alive < min_acceptance:
            break
        if drafted == 0:
            first_match = match
        tokens[drafted], acceptance[drafted] = token, alive
        remember(sequences, row, drafted, token, cell)
        drafted += 1
        state, length = _after(records, heads, sizes, state, length, token)
        edge = find(records, heads, sizes, beside, token) if first == 1 else NONE
        beside = np.int64(records[edge, TARGET]) if edge != NONE else NONE
        beside_length += 1
        age += 1
    sequences[row, DRAFTED] = drafted
    return drafted, first_match
