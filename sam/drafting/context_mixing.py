"""The text's continuation, predicted by contexts of a suffix automaton weighed by how often each has been right.

Four parts decide on a draft token.

- The two longest suffixes of the text that were continued before. Their continuations' shares are interpolated from
  the shorter context to the longer, as in prediction by partial matching (Cleary and Witten, 1984); the weight of a
  context depends on its length and on the evidence in it.
- The recovery context. Where the text departed from the prediction ("= 12" instead of "= 15"), it often goes on as if
  it had not: the state that the predicted token leads to is followed beside the text, and its continuation joins the
  interpolation. Compressors call this the recovery of a match model.
- What followed in other prompts' text (sam.drafting.prompt_memory). It joins last; its weight depends on how much of
  the text it and the group have recognised, and on the evidence.
- How often earlier drafts were accepted, by which raw probabilities are calibrated (sam.drafting.texts).

Weights are learnt from every token by online expectation maximisation: a weight moves towards the share of the actual
token's probability that its context brought. Equal calls give equal drafts.
"""

from typing import NamedTuple

import numpy as np

from sam.automaton.store import NONE, find
from sam.drafting.prompt_memory import STRENGTHS, is_best, recall, share_of
from sam.drafting.texts import add_draft_token, make_acceptance
from sam.jit import kernel

LENGTH_BUCKETS = 9
EVIDENCE_BUCKETS = 12
AGE_BUCKETS = 4
SLOWEST = 0.002  # learning rate of a weight that has been learnt for long
PRIOR = 8.0  # updates that the initial weights count for
# Weights before anything is learnt.
SUFFIX_WEIGHT = 0.7
RECOVERY_WEIGHT = 0.3
MEMORY_WEIGHT = 0.3
FLOOR = 1e-5  # probability of a token that no context knows
# Weights of suffix contexts are indexed by match length and evidence; from FIRST_RECOVERY on come those of recovery
# contexts, indexed by match length, age and evidence, and from FIRST_OF_MEMORY on those of the memory of other prompts,
# indexed by strength, the group's match length and evidence.
FIRST_RECOVERY = LENGTH_BUCKETS * EVIDENCE_BUCKETS
FIRST_OF_MEMORY = FIRST_RECOVERY + LENGTH_BUCKETS * AGE_BUCKETS * EVIDENCE_BUCKETS
NUM_WEIGHTS = FIRST_OF_MEMORY + STRENGTHS * LENGTH_BUCKETS * EVIDENCE_BUCKETS
MIXING = np.dtype([("weight", "f8"), ("num_updates", "f8")], align=True)


class Learned(NamedTuple):
    """All that drafting learns."""

    mixing: np.ndarray  # MIXING [contexts], the weights of contexts
    acceptance: np.ndarray  # ACCEPTANCE [bins + 1], the table of sam.drafting.texts


def make_learned() -> Learned:
    """Initial weights, and an empty table."""
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
    """0-4: the only continuation, seen once, twice, up to 4, up to 9 times, more; 5-6: one of several, seen once or
    twice; 7-11: one of several, by its share."""
    if count == total:
        return (count > 1) + (count > 2) + (count > 4) + (count > 9)
    if count <= 2:
        return 4 + count
    return 7 + (5 * count >= total) + (5 * count >= 2 * total) + (5 * count >= 3 * total) + (5 * count >= 4 * total)


@kernel
def memory_weight(recalled, match_len):
    """Index of the weight of the memory of other prompts."""
    bucket = recalled.strength * LENGTH_BUCKETS + length_bucket(match_len)
    evidence = evidence_bucket(recalled.counts[recalled.best], recalled.total)
    return FIRST_OF_MEMORY + bucket * EVIDENCE_BUCKETS + evidence


@kernel
def learn_weight(entry, p, share):
    """Interpolate `share`, of the actual token, into its probability `p`, and learn the weight; returns the mixture."""
    weight = entry.weight
    seen = entry.num_updates
    mixed = p + weight * (share - p)
    weight += max(SLOWEST, 1.0 / (seen + PRIOR)) * (weight * share / mixed - weight)
    entry.weight = min(0.999, max(0.001, weight))
    entry.num_updates = seen + 1.0
    return mixed


class Place(NamedTuple):
    """Where a text, or a draft behind it, stands."""

    state: int  # of the longest suffix in the group; it may have longer strings as well
    length: int  # of that suffix
    recovery_state: int  # NONE: there is no recovery context
    recovery_match_len: int
    age: int  # tokens since the last mismatch of the recovery context


class Context(NamedTuple):
    """A state (NONE: no context), the index of its weight, and the token that followed it most often."""

    state: int
    weight_index: int
    token: int


class Contexts(NamedTuple):
    """In the order in which they are interpolated."""

    shorter: Context
    longest: Context
    recovery: Context


@kernel
def end_of(store, text):
    """The Place in which a text ends, as far as it has been appended."""
    end = np.int64(text.end)
    age = text.tokens_since_mismatch
    return Place(end, np.int64(store.nodes[end].length), text.recovery_state, text.recovery_match_len, age)


@kernel
def _skip_dead_ends(store, state, length):
    """The longest suffix with a continuation, from a state and a match length on: its state, or NONE, and length."""
    nodes = store.nodes
    while state != NONE and nodes[state].total_count == 0:
        state, length = _shorten(store, state)
    return state, length


@kernel
def _shorten(store, state):
    """The state of the next shorter suffix, or NONE, and its length."""
    state = np.int64(store.nodes[state].link)
    return state, np.int64(store.nodes[state].length) if state != NONE else np.int64(0)


@kernel
def _context(store, state, first_weight):
    node = store.nodes[state]
    best = store.nodes[node.argmax_edge]
    evidence = evidence_bucket(best.count, node.total_count)
    return Context(np.int64(state), np.int64(first_weight + evidence), np.int64(best.token))


@kernel
def find_contexts(store, place):
    """The contexts of a place, recovery only if its match is longer than the text's own; and the length of the longest
    suffix with a continuation, which may be empty."""
    recovery = longest = shorter = Context(np.int64(NONE), np.int64(0), np.int64(NONE))
    state, length = _skip_dead_ends(store, place.state, place.length)
    match_len = length
    if place.recovery_state != NONE and place.recovery_match_len > length:
        if store.nodes[place.recovery_state].total_count != 0:
            bucket = length_bucket(place.recovery_match_len) * AGE_BUCKETS + min(place.age, AGE_BUCKETS - 1)
            recovery = _context(store, place.recovery_state, FIRST_RECOVERY + bucket * EVIDENCE_BUCKETS)
    if state != NONE:
        longest = _context(store, state, length_bucket(length) * EVIDENCE_BUCKETS)
        state, length = _shorten(store, state)
        if state != NONE:
            shorter = _context(store, state, length_bucket(length) * EVIDENCE_BUCKETS)
    return Contexts(shorter, longest, recovery), match_len


@kernel
def _share(store, state, token):
    """Share of `token` among the tokens that followed `state`."""
    node = store.nodes[state]
    edge = np.int64(node.argmax_edge)
    if store.nodes[edge].token != token:
        edge = find(store, state, token)
        if edge == NONE:
            return 0.0
    return store.nodes[edge].count / node.total_count


@kernel
def probability_of(store, mixing, contexts, match_len, recalled, token):
    """The shares of `token`, interpolated from the shorter suffix to the recovery context and the memory."""
    p = FLOOR
    for context in contexts:
        if context.state != NONE:
            p += mixing[context.weight_index].weight * (_share(store, context.state, token) - p)
    if recalled.total != 0:
        p += mixing[memory_weight(recalled, match_len)].weight * (share_of(recalled, token) - p)
    return p


@kernel
def is_nothing(contexts, match_len, recalled):
    """Whether only the empty suffix is left: the likeliest token of all is seldom right."""
    return match_len == 0 and contexts.recovery.state == NONE and recalled.total == 0


@kernel
def predict(store, mixing, contexts, match_len, recalled):
    """The likeliest of the most frequent continuations, and its raw probability; `recalled`: Continuations."""
    longest = contexts.longest
    recovery = contexts.recovery
    likeliest = np.int64(NONE)
    probability = 0.0
    left = 1.0
    if recalled.total != 0:
        likeliest = recalled.tokens[recalled.best]
        probability = probability_of(store, mixing, contexts, match_len, recalled, likeliest)
        left -= probability
    for i in range(2, -1, -1):
        context = contexts[i]
        if left < probability:
            break  # no other token can be likelier
        if (
            context.state == NONE
            or is_best(recalled, context.token)
            or (i < 2 and context.token == recovery.token)
            or (i < 1 and context.token == longest.token)
        ):
            continue
        p = probability_of(store, mixing, contexts, match_len, recalled, context.token)
        if p > probability:
            likeliest = context.token
            probability = p
        left -= p
    return likeliest, probability


@kernel
def learn(store, mixing, text, recalled, token):
    """Learn from `token`, which follows the text and is not yet appended; `recalled`: as `predict` takes it."""
    contexts, match_len = find_contexts(store, end_of(store, text))
    p = FLOOR
    for context in contexts:
        if context.state != NONE:
            p = learn_weight(mixing[context.weight_index], p, _share(store, context.state, token))
    if recalled.total != 0:
        learn_weight(mixing[memory_weight(recalled, match_len)], p, share_of(recalled, token))
    follow_recovery(store, contexts, match_len, text, token)


@kernel
def follow_recovery(store, contexts, match_len, text, token):
    """Move the text's recovery context over `token`, which follows, or begin one there."""
    text.recovery_state = _next_recovery(store, text, token) if contexts.recovery.state != NONE else NONE
    longest = contexts.longest
    if match_len > 0 and text.recovery_state == NONE and longest.token != token:
        text.recovery_state = store.nodes[store.nodes[longest.state].argmax_edge].target
        text.recovery_match_len = match_len + 1
        text.tokens_since_mismatch = text.num_mismatches = 0


@kernel
def _next_recovery(store, text, token):
    """The recovery state after `token`, which may be a second mismatch."""
    nodes = store.nodes
    state = text.recovery_state
    edge = find(store, state, token)
    if edge != NONE:
        text.recovery_match_len += 1
        text.tokens_since_mismatch += 1
        return np.int64(nodes[edge].target)
    if text.num_mismatches == 1:
        return np.int64(NONE)
    text.num_mismatches += 1
    text.tokens_since_mismatch = 0
    return np.int64(nodes[nodes[state].argmax_edge].target)


@kernel
def advance(store, state, length, token):
    """The text's longest repeated suffix when `token` follows: a state, of the root if need be, and a length."""
    edge = find(store, state, token)
    while edge == NONE:
        if store.nodes[state].link == NONE:
            return state, np.int64(0)
        state, length = _shorten(store, state)
        edge = find(store, state, token)
    return np.int64(store.nodes[edge].target), length + 1


@kernel
def go_on(store, contexts, place, token):
    """The place after a drafted `token`."""
    state, length = advance(store, place.state, place.length, token)
    edge = find(store, place.recovery_state, token) if contexts.recovery.state != NONE else np.int64(NONE)
    recovery_state = np.int64(store.nodes[edge].target) if edge != NONE else np.int64(NONE)
    return Place(state, length, recovery_state, place.recovery_match_len + 1, place.age + 1)


@kernel
def draft(store, memory, learned, sequences, slot, budget, min_acceptance):
    """Draft up to `budget` tokens into the slot."""
    place = end_of(store, sequences.texts[slot])
    draft_from(store, memory, learned, sequences, slot, place, budget, min_acceptance)


@kernel
def draft_from(store, memory, learned, sequences, slot, place, budget, min_acceptance):
    """As `draft`, for a text that ends in `place`."""
    text = sequences.texts[slot]
    probability = 1.0
    text.num_drafted = 0
    while text.num_drafted < budget:
        contexts, match_len = find_contexts(store, place)
        recalled = recall(memory, sequences, slot, text.num_drafted)
        if is_nothing(contexts, match_len, recalled):
            break
        token, next_probability = predict(store, learned.mixing, contexts, match_len, recalled)
        probability *= next_probability
        if not add_draft_token(learned.acceptance, sequences, slot, token, probability, min_acceptance):
            break
        place = go_on(store, contexts, place, token)
