"""One engine step for many sequences in one compiled call: append what was sampled, then draft.

A sequence also follows a static corpus, as in SAM-Decoding (Hu et al., 2024): an automaton that is never extended. The
draft comes from there when the match in the corpus is longer than the one in the group by `corpus_bias`.
"""

from __future__ import annotations

import numpy as np

from sam.automaton.store import BEST, COUNT, LENGTH, LINK, NONE, TARGET, TOKEN, TOTAL, find, reserve
from sam.automaton.suffix_automaton import extend
from sam.drafting import context_mixing
from sam.drafting.calibration import DRAFTED, acceptance_of, cell_of, remember, settle
from sam.drafting.context_mixing import CORPUS_LENGTH, CORPUS_ROWS, CORPUS_STATE, GROUP, NUM_TOKENS
from sam.jit import compiled


@compiled
def append(records, heads, groups, sizes, weights, room, sequences, row, tokens, first, last):
    """Append tokens[first:last], for which the group has reserved room, and learn from them."""
    settle(weights, context_mixing.ACCEPTED_ROWS, sequences, row, tokens, first, last)
    group, end = sequences[row, context_mixing.GROUP], sequences[row, context_mixing.END]
    for i in range(first, last):
        token = np.int64(tokens[i])
        context_mixing.learn(records, heads, sizes, weights, room, sequences, row, token)
        end = np.int64(extend(records, heads, groups, sizes, group, end, token))
        sequences[row, context_mixing.END] = end
    sequences[row, context_mixing.NUM_TOKENS] += last - first


@compiled
def follow_corpus(records, heads, sizes, sequences, row, tokens, first, last):
    """Move the sequence's match in the corpus along tokens[first:last]; the root of a corpus is its first record."""
    state, length = sequences[row, CORPUS_STATE], sequences[row, CORPUS_LENGTH]
    for i in range(first, last):
        token = np.int64(tokens[i])
        edge = find(records, heads, sizes, state, token)
        while edge == NONE and records[state, LINK] != NONE:
            state = np.int64(records[state, LINK])
            length = np.int64(records[state, LENGTH])
            edge = find(records, heads, sizes, state, token)
        if edge != NONE:
            state, length = np.int64(records[edge, TARGET]), length + 1
    sequences[row, CORPUS_STATE], sequences[row, CORPUS_LENGTH] = state, length


@compiled
def draft_from_corpus(records, weights, sequences, row, budget, min_acceptance, tokens, acceptance):
    """The most frequent continuations of the sequence's match in the corpus; as `context_mixing.draft`."""
    state, drafted, raw, alive = sequences[row, CORPUS_STATE], 0, 1.0, 1.0
    while drafted < budget:
        while state != NONE and records[state, TOTAL] == 0:
            state = np.int64(records[state, LINK])
        if state == NONE:
            break
        edge = records[state, BEST]
        raw *= records[edge, COUNT] / records[state, TOTAL]
        cell = cell_of(CORPUS_ROWS, drafted, raw)
        alive = min(alive, acceptance_of(weights, CORPUS_ROWS, cell, raw))
        if alive < min_acceptance:
            break
        tokens[drafted], acceptance[drafted] = records[edge, TOKEN], alive
        remember(sequences, row, drafted, records[edge, TOKEN], cell)
        drafted += 1
        state = np.int64(records[edge, TARGET])
    sequences[row, DRAFTED] = drafted
    return drafted, sequences[row, CORPUS_LENGTH]


@compiled
def append_all(store, corpus, weights, room, sequences, rows, tokens, offsets):
    """Append each row's new tokens, tokens[offsets[i]:offsets[i + 1]]. A row that finds no block left loses its group.

    Returns:
        How many rows did; with nothing changed, -1 if a token is negative, -2 if the offsets do not fit the tokens.
    """
    records, heads, groups, sizes = store
    corpus_records, corpus_heads, _, corpus_sizes = corpus
    for token in tokens:
        if token < 0:
            return -1
    if offsets.size != rows.size + 1 or offsets[0] != 0 or offsets[-1] != tokens.size or np.any(np.diff(offsets) < 0):
        return -2
    lost = 0
    for i in range(rows.size):
        row, first, last = rows[i], offsets[i], offsets[i + 1]
        if first == last:
            continue
        group = sequences[row, GROUP]
        if group != NONE and not reserve(records, heads, groups, sizes, group, last - first):
            sequences[row, GROUP] = group = NONE
            lost += 1
        if group == NONE:
            sequences[row, NUM_TOKENS] += last - first
            continue
        append(records, heads, groups, sizes, weights, room, sequences, row, tokens, first, last)
        follow_corpus(corpus_records, corpus_heads, corpus_sizes, sequences, row, tokens, first, last)
    return lost


@compiled
def draft_all(store, corpus, weights, room, sequences, rows, budgets, longest, min_acceptance, corpus_bias):
    """Draft for each row up to its budget, and `longest` tokens at most.

    Returns:
        int32 [total] tokens, float32 [total] cumulative acceptance probabilities, int64 [rows + 1] where each row's
        begin, int32 [rows] lengths of the matches.
    """
    records, heads, _, sizes = store
    corpus_records = corpus[0]
    tokens, acceptance = np.empty(rows.size * longest, np.int32), np.empty(rows.size * longest, np.float32)
    offsets, matches = np.zeros(rows.size + 1, np.int64), np.zeros(rows.size, np.int32)
    for i in range(rows.size):
        row, first, budget = rows[i], offsets[i], min(np.int64(budgets[i]), longest)
        drafted = 0
        if sequences[row, GROUP] != NONE and budget > 0:
            longer = sequences[row, CORPUS_LENGTH] - corpus_bias
            if longer > 0 and longer > context_mixing.match_length(records, sequences, row):
                drafted, matches[i] = draft_from_corpus(
                    corpus_records, weights, sequences, row, budget, min_acceptance, tokens[first:], acceptance[first:]
                )
            else:
                drafted, matches[i] = context_mixing.draft(
                    records,
                    heads,
                    sizes,
                    weights,
                    room,
                    sequences,
                    row,
                    budget,
                    min_acceptance,
                    tokens[first:],
                    acceptance[first:],
                )
        offsets[i + 1] = first + drafted
    return tokens[: offsets[-1]], acceptance[: offsets[-1]], offsets, matches
