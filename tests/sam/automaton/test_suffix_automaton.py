"""The automaton against brute force: all suffixes, all counts, every link and length."""

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sam.automaton.store import BLOCK_BYTES, add_group, extend, make_store, reserve
from sam.jit import compiled
from tests.sam.brute_force import BruteForce, check_automaton, check_blocks


@compiled
def extend_all(store, group, last, tokens):
    for token in tokens:
        last = np.int64(extend(store, group, last, np.int64(token)))
    return last


class Texts:
    """Sequences that grow in one automaton."""

    def __init__(self, memory_budget_bytes=1 << 20):
        self.store = make_store(memory_budget_bytes // BLOCK_BYTES)
        self.root = add_group(self.store, 0)
        self.ends = {}

    def extend(self, sequence, tokens):
        assert reserve(self.store, 0, len(tokens))
        last = np.int64(self.ends.get(sequence, self.root))
        self.ends[sequence] = extend_all(self.store, 0, last, np.asarray(tokens, np.int32))


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
@example([(0, 0)] * 50 + [(0, 1), (0, 0), (0, 2)])  # a new letter after a period
@example([(i // 2, 99 if i % 2 else i) for i in range(80)])  # sequences of two tokens with one end
def test_any_interleaving_of_texts(appends):
    """`appends`: sequences with a token each."""
    texts, truth = Texts(), BruteForce()
    for sequence, token in appends:
        texts.extend(sequence, [token])
        truth.append(sequence, token)
    check_automaton(texts.store, texts.root, truth, texts.ends)
    check_blocks(texts.store, [0])


def test_long_texts_stay_within_the_bound_and_the_block_size():
    rng = np.random.default_rng(0)
    skewed = rng.exponential(3, 100_000).astype(np.int64)
    for text in (rng.integers(2, size=100_000), skewed, ([0] * 100 + [1, 2, 3]) * 970):
        texts = Texts(16 << 20)
        for number, piece in enumerate(np.array_split(text, 7)):
            texts.extend(number, piece)
        assert int(texts.store.counters[0]["num_used_blocks"]) * BLOCK_BYTES <= 128 * (len(text) + 32)


def test_branches_off_one_prompt_with_more_extra_edges_than_tokens_stay_inside_the_table():
    rng, texts = np.random.default_rng(0), Texts(memory_budget_bytes=4 * BLOCK_BYTES)
    texts.extend("prompt", rng.integers(64, size=20))
    for sequence in range(53):
        texts.ends[sequence] = texts.ends["prompt"]
        texts.extend(sequence, rng.integers(64, size=2))
    counters = texts.store.counters[0]
    assert counters["num_hashed_edges"] > len(texts.store.hash_buckets) >= counters["num_buckets"]
    check_blocks(texts.store, [0])
