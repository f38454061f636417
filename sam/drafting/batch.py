"""One engine step for many sequences in one compiled call: append the sampled tokens, then draft.

A sequence also follows a static corpus, as in SAM-Decoding (Hu et al., 2024): an automaton that is never extended. The
draft comes from there when the match in the corpus is longer than the one in the group by `min_extra_match_len`.
"""

import numpy as np

from sam.automaton.edge_table import NONE, find
from sam.automaton.store import reserve
from sam.automaton.suffix_automaton import extend
from sam.drafting import context_mixing
from sam.drafting.calibration import CORPUS_TABLE, add_draft_token, start_draft, update_calibration
from sam.drafting.prompt_memory import nothing, recall, remember
from sam.drafting.sequences import RECENT_TOKENS
from sam.jit import compiled, compiled_for_threads, kernel

PROMPT_SLOT = 0  # belongs to no request: prompts are appended with it
NEGATIVE_TOKEN, BAD_OFFSETS = -1, -2  # returned by `append_all` for input that it refuses


@kernel
def append(store, memory, learned, sequences, slot, tokens, first, last):
    """Append tokens[first:last], for which the group has reserved space, and learn from them.

    How far the memory of other prompts is right is learnt from responses: most prompts begin as others do.
    """
    update_calibration(learned.acceptance, sequences, slot, tokens, first, last)
    text = sequences.texts[slot]
    for i in range(first, last):
        token = np.int64(tokens[i])
        recalled = recall(memory, sequences, slot, 0) if slot != PROMPT_SLOT else nothing()
        context_mixing.learn(store, learned.mixing, text, recalled, token)
        remember(memory, sequences, slot, token)
        sequences.recent_tokens[slot, text.num_tokens % RECENT_TOKENS] = token
        text.end = extend(store, text.group, text.end, token)
        text.num_tokens += 1


@kernel
def follow_corpus(corpus, sequences, slot, tokens, first, last):
    """Move the sequence's match in the corpus along tokens[first:last]; the root of a corpus is its first node."""
    nodes, text = corpus.nodes, sequences.texts[slot]
    state, length = text.corpus_state, text.corpus_match_len
    for i in range(first, last):
        token = np.int64(tokens[i])
        edge = find(corpus, state, token)
        while edge == NONE and nodes[state].link != NONE:
            state = np.int64(nodes[state].link)
            length = np.int64(nodes[state].length)
            edge = find(corpus, state, token)
        if edge != NONE:
            state, length = np.int64(nodes[edge].target), length + 1
    text.corpus_state, text.corpus_match_len = state, length


@kernel
def draft_from_corpus(corpus, learned, sequences, slot, budget, min_acceptance):
    """Draft the most frequent continuations of the match in the corpus; as `context_mixing.draft`."""
    nodes, text = corpus.nodes, sequences.texts[slot]
    start_draft(sequences, slot, CORPUS_TABLE)
    state, probability = text.corpus_state, 1.0
    while text.num_drafted < budget:
        while state != NONE and nodes[state].total_count == 0:
            state = np.int64(nodes[state].link)
        if state == NONE:
            break
        best = nodes[nodes[state].argmax_edge]
        probability *= best.count / nodes[state].total_count
        if not add_draft_token(learned.acceptance, sequences, slot, best.token, probability, min_acceptance):
            break
        state = np.int64(best.target)
    return text.corpus_match_len


@kernel
def draft(store, corpus, memory, learned, sequences, slot, budget, min_acceptance, min_extra_match_len):
    """Draft up to `budget` tokens into the slot, from the group or the corpus; returns the length of the match."""
    text = sequences.texts[slot]
    corpus_match_len = text.corpus_match_len - min_extra_match_len
    if corpus_match_len > 0 and corpus_match_len > context_mixing.match_length(store, text):
        return draft_from_corpus(corpus, learned, sequences, slot, budget, min_acceptance)
    return context_mixing.draft(store, memory, learned, sequences, slot, budget, min_acceptance)


@compiled
def append_all(store, corpus, memory, learned, sequences, slots, tokens, offsets):
    """Append each slot's new tokens, tokens[offsets[i]:offsets[i + 1]]; a slot without a free block loses its group.

    Returns:
        The number of slots that did; with nothing changed, NEGATIVE_TOKEN or BAD_OFFSETS, which do not fit the tokens.
    """
    for token in tokens:
        if token < 0:
            return NEGATIVE_TOKEN
    if offsets.size != slots.size + 1 or offsets[0] != 0 or offsets[-1] != tokens.size or np.any(np.diff(offsets) < 0):
        return BAD_OFFSETS
    lost = 0
    for i in range(slots.size):
        first, last = offsets[i], offsets[i + 1]
        lost += _append_or_lose(store, corpus, memory, learned, sequences, slots[i], tokens, first, last)
    return lost


@kernel
def _append_or_lose(store, corpus, memory, learned, sequences, slot, tokens, first, last):
    text = sequences.texts[slot]
    if first == last:
        return False
    lost = text.group != NONE and not reserve(store, text.group, last - first)
    if lost:
        text.group = NONE
    if text.group == NONE:
        text.num_tokens += last - first
        return lost
    append(store, memory, learned, sequences, slot, tokens, first, last)
    follow_corpus(corpus, sequences, slot, tokens, first, last)
    return False


@compiled_for_threads
def append_elsewhere(store, corpus, memory, learned, sequences, slots, tokens, offsets):
    """As `append_all`; the engine's thread goes on meanwhile."""
    return append_all(store, corpus, memory, learned, sequences, slots, tokens, offsets)


@compiled
def draft_all(store, corpus, memory, learned, sequences, slots, budgets, min_acceptance, min_extra_match_len):
    """Draft for each slot up to its budget.

    Returns:
        int32 [total] tokens, float32 [total] cumulative acceptance probabilities, int64 [slots + 1] where each slot's
        begin, int32 [slots] lengths of the matches.
    """
    longest = sequences.draft_tokens.shape[1]
    tokens, acceptance = np.empty(slots.size * longest, np.int32), np.empty(slots.size * longest, np.float32)
    offsets, matches = np.zeros(slots.size + 1, np.int64), np.zeros(slots.size, np.int32)
    texts, draft_tokens, draft_acceptance = sequences.texts, sequences.draft_tokens, sequences.draft_acceptance
    for i in range(slots.size):
        slot, end, budget = slots[i], offsets[i], min(np.int64(budgets[i]), longest)
        if texts[slot].group != NONE and budget > 0:
            matches[i] = draft(
                store, corpus, memory, learned, sequences, slot, budget, min_acceptance, min_extra_match_len
            )
            for position in range(texts[slot].num_drafted):
                tokens[end] = draft_tokens[slot, position]
                acceptance[end] = draft_acceptance[slot, position]
                end += 1
        offsets[i + 1] = end
    return tokens[: offsets[-1]], acceptance[: offsets[-1]], offsets, matches
