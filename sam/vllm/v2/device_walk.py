"""Drafts made on a GPU from an automaton that the host extends a step or more late.

A Triton program a request walks from where the host's text ends over the tokens that the host has not appended, and
drafts behind them: sam.drafting.late, on the drafter's own arrays. It writes nothing but drafts. Should the host write
while the device reads, a torn read costs a draft and never more: each loop is bounded, each index is clamped into its
array, each drafted token is in the vocabulary.

Probabilities are float64 without fused multiply-adds, as the host's: equal arrays give equal drafts on both.
"""

from collections import namedtuple
from typing import NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from sam.automaton import store as automaton_store
from sam.drafting import context_mixing, prompt_memory, texts
from sam.drafting.drafter import Drafter

NONE = tl.constexpr(automaton_store.NONE)
FLOOR = tl.constexpr(context_mixing.FLOOR)
LENGTH_BUCKETS = tl.constexpr(context_mixing.LENGTH_BUCKETS)
EVIDENCE_BUCKETS = tl.constexpr(context_mixing.EVIDENCE_BUCKETS)
AGE_BUCKETS = tl.constexpr(context_mixing.AGE_BUCKETS)
FIRST_RECOVERY = tl.constexpr(context_mixing.FIRST_RECOVERY)
FIRST_OF_MEMORY = tl.constexpr(context_mixing.FIRST_OF_MEMORY)
NUM_WEIGHTS = tl.constexpr(context_mixing.NUM_WEIGHTS)
TEXT_FIELDS = tl.constexpr(len(texts.SEQUENCE.names))
HASH_A = tl.constexpr(0x9E3779B97F4A7C15)
HASH_B = tl.constexpr(0xC2B2AE3D27D4EB4F)
# Bounds of loops, beyond which a draft ends: 8 edges of a bucket and 10 links are the most seen on recordings.
MAX_PENDING = tl.constexpr(64)
MAX_LINKS = tl.constexpr(256)
MAX_CHAIN = tl.constexpr(64)

assert prompt_memory.ORDERS == (2, 4, 8) and texts.RECENT_TOKENS == 8  # eight tokens are kept in registers
assert automaton_store.NODE.itemsize == 32 and prompt_memory.ENTRY.itemsize == 8


class Automaton(NamedTuple):
    """A drafter's arrays as flat tensors, in a kernel as pointers."""

    texts: torch.Tensor  # int64 [slots * TEXT_FIELDS], SEQUENCE
    recent: torch.Tensor  # int32 [slots * 8]
    nodes: torch.Tensor  # int64 [4 * num_nodes], NODE
    num_nodes: int
    buckets: torch.Tensor  # int32 [most_buckets]
    most_buckets: int
    counters: torch.Tensor  # int64, COUNTERS
    weights: torch.Tensor  # float64 [2 * NUM_WEIGHTS], MIXING
    rows: torch.Tensor  # int64 [4 * num_rows], of the memory of other prompts
    num_rows: int


# Of values in registers.
Store = namedtuple("Store", "nodes num_nodes buckets most_buckets num_buckets base_buckets")
# NODE; an extra edge's node has its source in `length` and its `hash_next` in `total`.
Node = namedtuple("Node", "length link total best extra token target count")
# A node, and the most frequent edge; total 0: the state has no edges, or is no context.
State = namedtuple("State", "index node total best_token best_target best_count")
# As those of sam.drafting.context_mixing.
Place = namedtuple("Place", "state length recovery_state recovery_len age")
Contexts = namedtuple("Contexts", "shorter longest recovery match_len")
# What the memory of other prompts has: of a context; and the most frequent token, of the longest context that it knows.
Row = namedtuple("Row", "total token0 token1 token2 count0 count1 count2")
Recalled = namedtuple("Recalled", "row strength token count")


@triton.jit
def _two(words):
    """Two int32 that share an aligned int64."""
    both = tl.load(words)
    return both.to(tl.int32), (both >> 32).to(tl.int32)


@triton.jit
def _node(store, index):
    """A node: its 32 bytes are one sector, so one access."""
    words = store.nodes + tl.minimum(tl.maximum(index, 0), store.num_nodes - 1).to(tl.int64) * 4
    length, link = _two(words)
    total, best = _two(words + 1)
    extra, token = _two(words + 2)
    target, count = _two(words + 3)
    return Node(length, link, total, best, extra, token, target, count)


@triton.jit
def _state(store, index, node, is_context):
    """A state from its node."""
    total = tl.where(is_context, node.total, 0)
    best = _node(store, tl.where(total != 0, node.best, index))
    return State(index, node, total, best.token, best.target, best.count)


@triton.jit
def _find(store, state, token):
    """Whether the state has an edge by `token`, and the edge's target and count."""
    node = state.node
    is_best = state.best_token == token
    has_edge = ((node.token == token) | is_best) & (state.total != 0)
    target = tl.where(is_best, state.best_target, node.target)
    count = tl.where(is_best, state.best_count, node.count)
    if (state.total != 0) & (node.extra != NONE) & (has_edge == 0):
        h = (state.index.to(tl.uint64) * HASH_A) ^ (token.to(tl.uint64) * HASH_B)
        h = h ^ (h >> 29)
        bucket = (h & (2 * store.base_buckets - 1).to(tl.uint64)).to(tl.int64)
        bucket = tl.where(bucket < store.num_buckets, bucket, bucket - store.base_buckets)
        edge = tl.load(store.buckets + tl.minimum(tl.maximum(bucket, 0), store.most_buckets - 1))
        left = tl.cast(MAX_CHAIN, tl.int32)
        while (edge >= 0) & (left > 0):
            candidate = _node(store, edge)
            has_edge = (candidate.length == state.index) & (candidate.token == token)
            target = tl.where(has_edge, candidate.target, target)
            count = tl.where(has_edge, candidate.count, count)
            edge = tl.where(has_edge, NONE, candidate.total)
            left -= 1
    return has_edge, target, count


@triton.jit
def _advance(store, longest, match_len, token):
    """The longest repeated suffix when `token` follows: a state, its match length, and whether it was found in time."""
    has_edge, target, _count = _find(store, longest, token)
    state = longest.index
    link = longest.node.link
    length = match_len
    left = tl.cast(MAX_LINKS, tl.int32)
    while (has_edge == 0) & (link >= 0) & (left > 0):
        state = link
        node = _node(store, state)
        length = node.length
        link = node.link
        has_edge, target, _count = _find(store, _state(store, state, node, True), token)
        left -= 1
    return tl.where(has_edge, target, state), tl.where(has_edge, length + 1, 0), has_edge | (link < 0)


@triton.jit
def _contexts(store, place):
    """The contexts of a place but the shorter one, for which the longest stands."""
    recovery_node = _node(store, place.recovery_state)  # in any case: it is under way with the next
    node = _node(store, place.state)
    state = place.state
    match_len = place.length
    left = tl.cast(MAX_LINKS, tl.int32)
    while (node.total == 0) & (node.link >= 0) & (left > 0):
        state = node.link
        node = _node(store, state)
        match_len = node.length
        left -= 1
    match_len = tl.where(node.total != 0, match_len, 0)
    longest = _state(store, state, node, True)
    is_recovery = (place.recovery_state >= 0) & (place.recovery_len > match_len)
    return Contexts(longest, longest, _state(store, place.recovery_state, recovery_node, is_recovery), match_len)


@triton.jit
def _with_shorter(store, contexts):
    """All contexts."""
    longest = contexts.longest
    link = longest.node.link
    shorter = _state(store, link, _node(store, link), (longest.total != 0) & (link >= 0))
    return Contexts(shorter, longest, contexts.recovery, contexts.match_len)


@triton.jit
def _walk(store, place, mismatches, token):
    """The place and the recovery context's mismatches when `token` follows, and whether it was found in time."""
    contexts = _contexts(store, place)
    longest = contexts.longest
    recovery = contexts.recovery
    follows, target, _count = _find(store, recovery, token)
    departs = (recovery.total != 0) & (follows == 0) & (mismatches != 1)
    recovery_state = tl.where(follows, target, tl.where(departs, recovery.best_target, NONE))
    begins = (contexts.match_len > 0) & (recovery_state == NONE) & (longest.best_token != token)
    recovery_state = tl.where(begins, longest.best_target, recovery_state)
    recovery_len = tl.where(begins, contexts.match_len + 1, place.recovery_len + follows.to(tl.int32))
    age = tl.where(begins | departs, 0, place.age + follows.to(tl.int32))
    mismatches = tl.where(begins, 0, mismatches + departs.to(tl.int32))
    state, length, in_time = _advance(store, longest, contexts.match_len, token)
    return Place(state, length, recovery_state, recovery_len, age), mismatches, in_time


@triton.jit
def _go_on(store, contexts, place, token):
    """The place after a drafted `token`, and whether it was found in time."""
    follows, target, _count = _find(store, contexts.recovery, token)
    state, length, in_time = _advance(store, contexts.longest, contexts.match_len, token)
    recovery_state = tl.where(follows, target, NONE)
    return Place(state, length, recovery_state, place.recovery_len + 1, place.age + 1), in_time


@triton.jit
def _length_bucket(length):
    few = (length > 0).to(tl.int32) + (length > 1).to(tl.int32) + (length > 2).to(tl.int32) + (length > 4).to(tl.int32)
    many = (length > 8).to(tl.int32) + (length > 16).to(tl.int32)
    return few + many + (length > 32).to(tl.int32) + (length > 64).to(tl.int32)


@triton.jit
def _weight(weights, bucket, count, total):
    """The weight of a context whose most frequent token has `count` of `total`; `bucket`: where its weights begin."""
    only = (count > 1).to(tl.int32) + (count > 2).to(tl.int32) + (count > 4).to(tl.int32) + (count > 9).to(tl.int32)
    halves = (5 * count >= total).to(tl.int32) + (5 * count >= 2 * total).to(tl.int32)
    several = 7 + halves + (5 * count >= 3 * total).to(tl.int32) + (5 * count >= 4 * total).to(tl.int32)
    evidence = tl.where(count == total, only, tl.where(count <= 2, 4 + count, several))
    return tl.load(weights + 2 * tl.minimum(tl.maximum(bucket + evidence, 0), NUM_WEIGHTS - 1))


@triton.jit
def _push(last, token):
    """The last eight tokens, the newest first, when `token` follows."""
    return token, last[0], last[1], last[2], last[3], last[4], last[5], last[6]


@triton.jit
def _mix(h, token):
    h = (h + (token.to(tl.int64) + 1).to(tl.uint64)) * HASH_A
    return h ^ (h >> 29)


@triton.jit
def _entry(word, prompt_tag):
    """Token and count of an entry of the memory, without what the prompt's own text counted."""
    count = ((word >> 32) & 0xFFFF).to(tl.int32) - (((word >> 48) & 0xFFFF) == prompt_tag).to(tl.int32)
    return word.to(tl.int32), tl.maximum(count, 0)


@triton.jit
def _row(automaton, h, is_text, prompt_tag):
    """What the memory holds of a context, by its hash; all that may hold it is read at once."""
    index = (h & (automaton.num_rows - 1).to(tl.uint64)).to(tl.int64)
    check = (h >> 48).to(tl.int64)
    here = automaton.rows + index * 4
    there = automaton.rows + (index ^ 1) * 4
    head = tl.load(here)
    word0 = tl.load(here + 1)
    word1 = tl.load(here + 2)
    word2 = tl.load(here + 3)
    other_head = tl.load(there)
    other0 = tl.load(there + 1)
    other1 = tl.load(there + 2)
    other2 = tl.load(there + 3)
    is_here = (((head >> 48) & 0xFFFF) == check) & (((word0 >> 32) & 0xFFFF) != 0)
    is_there = (((other_head >> 48) & 0xFFFF) == check) & (((other0 >> 32) & 0xFFFF) != 0)
    token0, count0 = _entry(tl.where(is_here, word0, other0), prompt_tag)
    token1, count1 = _entry(tl.where(is_here, word1, other1), prompt_tag)
    token2, count2 = _entry(tl.where(is_here, word2, other2), prompt_tag)
    total = tl.where((is_here | is_there) & is_text & (h != 0), count0 + count1 + count2, 0)
    return Row(total, token0, token1, token2, count0, count1, count2)


@triton.jit
def _either(condition, a, b):
    return Row(
        tl.where(condition, a.total, b.total),
        tl.where(condition, a.token0, b.token0),
        tl.where(condition, a.token1, b.token1),
        tl.where(condition, a.token2, b.token2),
        tl.where(condition, a.count0, b.count0),
        tl.where(condition, a.count1, b.count1),
        tl.where(condition, a.count2, b.count2),
    )


@triton.jit
def _recall(automaton, last, num_tokens, prompt_tag):
    """What followed the longest known context of the last 2, 4 or 8 tokens."""
    two = _mix(_mix((num_tokens > 0).to(tl.uint64), last[0]), last[1])
    four = _mix(_mix(two, last[2]), last[3])
    eight = _mix(_mix(_mix(_mix(four, last[4]), last[5]), last[6]), last[7])
    weak = _row(automaton, two, num_tokens >= 2, prompt_tag)
    middle = _row(automaton, four, num_tokens >= 4, prompt_tag)
    strong = _row(automaton, eight, num_tokens >= 8, prompt_tag)
    strength = tl.where(strong.total != 0, 2, tl.where(middle.total != 0, 1, 0))
    row = _either(strong.total != 0, strong, _either(middle.total != 0, middle, weak))
    token = tl.where(row.count1 > row.count0, row.token1, row.token0)
    count = tl.maximum(row.count0, row.count1)
    token = tl.where(row.count2 > count, row.token2, token)
    return Recalled(row, strength, token, tl.maximum(row.count2, count))


@triton.jit
def _recalled_share(row, token):
    count = tl.where((row.token2 == token) & (row.count2 != 0), row.count2, 0)
    count = tl.where((row.token1 == token) & (row.count1 != 0), row.count1, count)
    count = tl.where((row.token0 == token) & (row.count0 != 0), row.count0, count)
    return count.to(tl.float64) / row.total.to(tl.float64)


@triton.jit
def _mixed(store, state, weight, token, p):
    """`p` with the token's share in a context interpolated into it."""
    if state.total != 0:
        has_edge, _target, count = _find(store, state, token)
        share = tl.where(has_edge, count.to(tl.float64) / state.total.to(tl.float64), 0.0)
        p += weight * (share - p)
    return p


@triton.jit
def _weights(automaton, contexts, place, recalled):
    """Those of the shorter, the longest and the recovery context, and of the memory."""
    shorter = contexts.shorter
    bucket = _length_bucket(shorter.node.length) * EVIDENCE_BUCKETS
    shorter_weight = _weight(automaton.weights, bucket, shorter.best_count, shorter.total)
    matched = _length_bucket(contexts.match_len)
    longest = contexts.longest
    longest_weight = _weight(automaton.weights, matched * EVIDENCE_BUCKETS, longest.best_count, longest.total)
    recovery = contexts.recovery
    bucket = _length_bucket(place.recovery_len) * AGE_BUCKETS + tl.minimum(place.age, AGE_BUCKETS - 1)
    bucket = FIRST_RECOVERY + bucket * EVIDENCE_BUCKETS
    recovery_weight = _weight(automaton.weights, bucket, recovery.best_count, recovery.total)
    bucket = FIRST_OF_MEMORY + (recalled.strength * LENGTH_BUCKETS + matched) * EVIDENCE_BUCKETS
    memory_weight = _weight(automaton.weights, bucket, recalled.count, recalled.row.total)
    return shorter_weight, longest_weight, recovery_weight, memory_weight


@triton.jit
def _predict(store, contexts, weights, recalled):
    """The likeliest of the most frequent continuations, and its raw probability."""
    from_memory = tl.where(recalled.row.total != 0, recalled.token, NONE)
    from_recovery = tl.where(contexts.recovery.total != 0, contexts.recovery.best_token, NONE)
    from_longest = tl.where(contexts.longest.total != 0, contexts.longest.best_token, NONE)
    from_shorter = tl.where(contexts.shorter.total != 0, contexts.shorter.best_token, NONE)
    likeliest = tl.cast(NONE, tl.int32)
    probability = tl.cast(0.0, tl.float64)
    rest = tl.cast(1.0, tl.float64)
    for i in range(4):
        token = tl.where(i == 0, from_memory, from_recovery)
        token = tl.where(i < 2, token, tl.where(i == 2, from_longest, from_shorter))
        is_new = (i < 1) | (token != from_memory)
        is_new = is_new & ((i < 2) | (token != from_recovery))
        is_new = is_new & ((i < 3) | (token != from_longest))
        if is_new & (token != NONE) & (rest >= probability):
            p = tl.cast(FLOOR, tl.float64)
            p = _mixed(store, contexts.shorter, weights[0], token, p)
            p = _mixed(store, contexts.longest, weights[1], token, p)
            p = _mixed(store, contexts.recovery, weights[2], token, p)
            if recalled.row.total != 0:
                p += weights[3] * (_recalled_share(recalled.row, token) - p)
            likeliest = tl.where(p > probability, token, likeliest)
            probability = tl.maximum(p, probability)
            rest -= p
    return likeliest, probability


@triton.jit
def _end_of(automaton, store, text):
    """Where the host's text ends, and the mismatches of its recovery context."""
    state = tl.load(text + 1).to(tl.int32)
    recovery_state = tl.load(text + 4).to(tl.int32)
    recovery_len = tl.load(text + 5).to(tl.int32)
    place = Place(state, _node(store, state).length, recovery_state, recovery_len, tl.load(text + 6).to(tl.int32))
    return place, tl.load(text + 7).to(tl.int32)


@triton.jit
def _last_tokens(recent, num_tokens):
    """The last eight tokens of the host's text, the newest first."""
    return (
        tl.load(recent + ((num_tokens + 7) & 7)),
        tl.load(recent + ((num_tokens + 6) & 7)),
        tl.load(recent + ((num_tokens + 5) & 7)),
        tl.load(recent + ((num_tokens + 4) & 7)),
        tl.load(recent + ((num_tokens + 3) & 7)),
        tl.load(recent + ((num_tokens + 2) & 7)),
        tl.load(recent + ((num_tokens + 1) & 7)),
        tl.load(recent + (num_tokens & 7)),
    )


@triton.jit
def draft_kernel(drafts, probabilities, num_drafted, slots, rows, tokens, stride, lengths, automaton, vocabulary, k):
    request = tl.program_id(0)
    slot = tl.load(slots + request).to(tl.int64)
    row = tl.load(rows + request).to(tl.int64)
    is_followed = (slot >= 0) & (row >= 0)
    text = automaton.texts + tl.maximum(slot, 0) * TEXT_FIELDS
    num_tokens = tl.load(text + 2)
    prompt_tag = tl.load(text + 9)
    counters = automaton.counters
    store = Store(
        automaton.nodes,
        automaton.num_nodes,
        automaton.buckets,
        automaton.most_buckets,
        tl.load(counters),
        tl.load(counters + 1),
    )
    place, mismatches = _end_of(automaton, store, text)
    last = _last_tokens(automaton.recent + tl.maximum(slot, 0) * 8, num_tokens)
    end = tl.load(lengths + tl.maximum(row, 0)).to(tl.int64)
    its_tokens = tokens + tl.maximum(row, 0) * stride
    pending = end - num_tokens
    going = is_followed & (tl.load(text) != NONE) & (pending >= 0) & (pending <= MAX_PENDING) & (num_tokens >= 0)
    while (num_tokens < end) & going:
        token = tl.load(its_tokens + num_tokens).to(tl.int32)
        place, mismatches, going = _walk(store, place, mismatches, token)
        last = _push(last, token)
        num_tokens += 1
    newest = tl.minimum(tl.maximum(last[0], 0), vocabulary - 1)
    drafted = tl.cast(0, tl.int32)
    cumulative = tl.cast(1.0, tl.float64)
    while (drafted < k) & going:
        recalled = _recall(automaton, last, num_tokens, prompt_tag)
        contexts = _with_shorter(store, _contexts(store, place))
        token, probability = _predict(store, contexts, _weights(automaton, contexts, place, recalled), recalled)
        is_known = (contexts.match_len > 0) | (contexts.recovery.total != 0) | (recalled.row.total != 0)
        going = is_known & (token >= 0) & (token < vocabulary)
        if going:
            cumulative *= probability
            tl.store(drafts + request * k + drafted, token.to(tl.int64))
            tl.store(probabilities + request * k + drafted, cumulative.to(tl.float32))
            drafted += 1
            place, going = _go_on(store, contexts, place, token)
            last = _push(last, token)
            num_tokens += 1
    tl.store(num_drafted + request, drafted)
    for i in range(drafted, k):
        tl.store(drafts + request * k + i, newest.to(tl.int64))
        tl.store(probabilities + request * k + i, 0.0)


def automaton_of(drafter: Drafter) -> Automaton:
    """A drafter's arrays as tensors of the same memory."""

    def words(array, dtype):
        return torch.from_numpy(array.reshape(-1).view(dtype))

    rows = drafter.memory.entries
    if not len(rows):
        rows = np.zeros((2, 1 + prompt_memory.CANDIDATES), prompt_memory.ENTRY)
    store = drafter.store
    return Automaton(
        texts=words(drafter.sequences.texts, np.int64),
        recent=words(drafter.sequences.recent_tokens, np.int32),
        nodes=words(store.nodes, np.int64),
        num_nodes=len(store.nodes),
        buckets=words(store.hash_buckets, np.int32),
        most_buckets=len(store.hash_buckets),
        counters=words(store.counters, np.int64),
        weights=words(drafter.learned.mixing, np.float64),
        rows=words(rows, np.int64),
        num_rows=len(rows),
    )


class Requests(NamedTuple):
    """What a step's requests are, as vLLM's second runner has it on the device."""

    slots: torch.Tensor  # int32 [requests], of the drafter; negative: not followed
    rows: torch.Tensor  # int32 [requests], of the next two; negative: none (idx_mapping)
    tokens: torch.Tensor  # int32 [rows, length], whole texts (all_token_ids)
    lengths: torch.Tensor  # int32 [rows], of the texts (total_len)


def draft(automaton: Automaton, requests: Requests, k: int, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Draft for each request behind its whole text, of which the drafter may have appended less; waits for nothing.

    Returns:
        int64 [requests, k] tokens, filled up by the text's newest; float32 [requests, k] raw cumulative probabilities;
        int32 [requests] their number.
    """
    count = len(requests.slots)
    device = requests.slots.device
    drafts = torch.empty((count, k), dtype=torch.int64, device=device)
    probabilities = torch.empty((count, k), dtype=torch.float32, device=device)
    num_drafted = torch.empty(count, dtype=torch.int32, device=device)
    out = drafts, probabilities, num_drafted
    slots, rows, tokens, lengths = requests
    given = slots, rows, tokens, tokens.stride(0), lengths, automaton, vocabulary, k
    draft_kernel[(count,)](*out, *given, num_warps=1, enable_fp_fusion=False)
    return out
