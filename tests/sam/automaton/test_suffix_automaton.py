"""The automaton against brute force: all suffixes, all counts, every link and length."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam.automaton import store
from sam.drafting.context_mixing import END
from sam.drafting.corpus import SuffixAutomaton
from tests.sam.brute_force import BruteForce, check_automaton, check_blocks


def grow(appends):
    """Apply (sequence, token) appends; returns the automaton, the truth and each sequence's number."""
    automaton, truth, numbers = SuffixAutomaton(1 << 20), BruteForce(), {}
    for sequence, token in appends:
        if sequence not in numbers:
            numbers[sequence] = automaton.start()
        automaton.extend(numbers[sequence], np.array([token]))
        truth.append(sequence, token)
    return automaton, truth, numbers


def check(appends):
    automaton, truth, numbers = grow(appends)
    ends = {name: int(automaton.sequences[number, END]) for name, number in numbers.items()}
    check_automaton(automaton.store, automaton.root, truth, ends)
    check_blocks(automaton.store, [0])


def fibonacci(length):
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


def random_appends(rng, length=60):
    sequences, alphabet = int(rng.integers(1, 6)), int(rng.integers(1, 6))
    return list(
        zip(rng.integers(sequences, size=length).tolist(), rng.integers(alphabet, size=length).tolist(), strict=True)
    )


CASES = {
    "one letter": [(0, 0)] * 60,
    "a new letter after a period": [(0, 0)] * 50 + [(0, 1), (0, 0), (0, 2)],
    "periodic": [(0, i % 3) for i in range(80)],
    "fibonacci": [(0, token) for token in fibonacci(80)],
    "duplicated samples": [(i % 2, (i // 2) % 5) for i in range(80)],
    "duplicated, one after the other": [(i // 30, fibonacci(30)[i % 30]) for i in range(60)],
    "interleaved, one ahead of the other": [(s, t) for i in range(30) for s, t in ((0, i % 4), (1, (i + 1) % 4))],
    "sequences of one token": [(i, i % 7) for i in range(60)],
    "sequences of two tokens with one end": [(i // 2, 99 if i % 2 else i) for i in range(80)],
    "all different": [(0, i) for i in range(60)],
}


@pytest.mark.parametrize("appends", CASES.values(), ids=CASES.keys())
def test_adversarial_texts(appends):
    check(appends)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3)), max_size=60))
def test_any_interleaving(appends):
    check(appends)


def test_random_texts():
    rng = np.random.default_rng(0)
    for _ in range(1000):
        check(random_appends(rng))


@pytest.mark.long
def test_a_million_appends():
    rng = np.random.default_rng(1)
    for _ in range(16_000):
        check(random_appends(rng))


def test_long_texts_stay_within_the_bound_and_the_block_size():
    rng = np.random.default_rng(0)
    texts = {
        "random": rng.integers(2, size=100_000),
        "skewed": (rng.exponential(3, 100_000)).astype(np.int64),
        "fibonacci": np.array(fibonacci(100_000)),
        "one letter, then others": np.array(([0] * 100 + [1, 2, 3]) * 970),
    }
    for text in texts.values():
        automaton = SuffixAutomaton(16 << 20)
        for sequence in np.array_split(text, 7):
            automaton.extend(automaton.start(), sequence)
        assert automaton.num_tokens == len(text)
        assert automaton.nbytes <= 128 * (len(text) + 32)


def test_growth_moves_nothing():
    """No stall: a large automaton gets its next block as a small one does, and old records stay where they are."""
    automaton = SuffixAutomaton(16 << 20)
    sequence = automaton.start()
    rng = np.random.default_rng(0)
    address = automaton.store.records.ctypes.data
    for _ in range(50):
        before = automaton.store.sizes.copy()
        automaton.extend(sequence, rng.integers(50, size=1000))
        grown = automaton.store.sizes - before
        assert grown[store.IN_USE] in (31, 32)
        assert 0 <= grown[store.BUCKETS] <= grown[store.LINKED] <= 2000
        assert automaton.store.sizes[store.LINKED] <= automaton.num_tokens
    assert automaton.store.records.ctypes.data == address


def test_save_and_load(tmp_path):
    rng = np.random.default_rng(0)
    automaton = SuffixAutomaton(1 << 22)
    automaton.extend(automaton.start(), rng.integers(20, size=5000))
    path = tmp_path / "corpus.sam"
    automaton.save(path)
    loaded = SuffixAutomaton.load(path)
    assert (loaded.num_tokens, loaded.nbytes, loaded.root) == (5000, automaton.nbytes, automaton.root)
    assert isinstance(loaded.store.records.base, np.memmap)  # its pages are the file's, shared by all who map it
    with pytest.raises(ValueError, match="loaded automaton cannot be extended"):
        loaded.extend(loaded.start(), np.array([1]))
    used = len(loaded.store.records)
    assert (loaded.store.records == automaton.store.records[:used]).all()
    assert [p.name for p in tmp_path.iterdir()] == ["corpus.sam"]


def test_added_texts_leave_sequences_alone():
    automaton = SuffixAutomaton(1 << 20, max_sequences=1)
    sequence = automaton.start()
    automaton.extend(sequence, np.array([5, 6]))
    automaton.add(np.array([5, 6, 7, 8]))
    assert automaton.draft(sequence, 2).token_ids.tolist() == [7, 8]


def test_damaged_files(tmp_path):
    automaton = SuffixAutomaton(1 << 20)
    automaton.extend(automaton.start(), np.arange(100))
    path = tmp_path / "corpus.sam"
    automaton.save(path)
    whole = path.read_bytes()
    for damage in (
        whole[:-1],
        whole[:5],
        b"",
        b"x" + whole[1:],
        whole[:-9] + b"\x01" + whole[-8:],
        whole[:40] + whole[80:],
    ):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match="damaged or not an automaton"):
            SuffixAutomaton.load(path)
    with pytest.raises(ValueError, match="no such file"):
        SuffixAutomaton.load(tmp_path / "missing.sam")


def test_bad_input():
    automaton = SuffixAutomaton(1 << 15, max_sequences=1)
    with pytest.raises(ValueError, match="sequence 0 was not started"):
        automaton.extend(0, np.array([1]))
    automaton.start()
    with pytest.raises(ValueError, match="max_sequences"):
        automaton.start()
    for tokens in ([-1], [2**31], [0.5]):
        with pytest.raises(ValueError, match="expected token ids"):
            automaton.extend(0, np.array(tokens))
    with pytest.raises(ValueError, match="memory_budget_bytes"):
        automaton.extend(0, np.arange(1000))
    with pytest.raises(ValueError, match="a budget of"):
        SuffixAutomaton(100)
