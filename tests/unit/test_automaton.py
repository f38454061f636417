"""The automaton against brute force: all suffixes, all counts."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from sam.automaton import COUNT, HEAD, LENGTH, LINK, NEXT, NONE, TARGET, TOKEN, Arena, extend


def grow(appends):
    """Apply (sequence, token) appends; returns the arena, each sequence's text and its end state."""
    arena = Arena(b"")
    arena.reserve(len(appends))
    texts, ends = defaultdict(list), {}
    for time, (sequence, token) in enumerate(appends):
        end = ends.get(sequence, arena.root)
        ends[sequence] = extend(arena.states, arena.edges, arena.table, arena.sizes, end, token, time)
        texts[sequence].append(token)
    return arena, texts, ends


def continuations(texts):
    """substring -> Counter of the tokens that follow it."""
    counts = defaultdict(Counter)
    for text in texts.values():
        for end in range(len(text)):
            for start in range(end + 1):
                counts[tuple(text[start:end])][text[end]] += 1
    return counts


def edges_of(arena, state):
    edge, found = arena.states[state, HEAD], {}
    while edge != NONE:
        found[int(arena.edges[edge, TOKEN])] = (int(arena.edges[edge, TARGET]), int(arena.edges[edge, COUNT]))
        edge = arena.edges[edge, NEXT]
    return found


def find(arena, text):
    state = arena.root
    for token in text:
        state = edges_of(arena, state)[token][0]
    return state


def fibonacci(length):
    a, b = [0], [0, 1]
    while len(b) < length:
        a, b = b, b + a
    return b[:length]


def random_appends(seed, sequences, length, alphabet):
    rng = np.random.default_rng(seed)
    return [(int(rng.integers(sequences)), int(rng.integers(alphabet))) for _ in range(length)]


CASES = {
    "one letter": [(0, 0)] * 40,
    "periodic": [(0, i % 3) for i in range(60)],
    "fibonacci": [(0, token) for token in fibonacci(60)],
    "duplicated samples": [(i % 2, (i // 2) % 5) for i in range(60)],
    "duplicated, one after the other": [(i // 30, fibonacci(30)[i % 30]) for i in range(60)],
    **{f"random {seed}": random_appends(seed, 1 + seed % 4, 70, 2 + seed % 3) for seed in range(40)},
}


@pytest.mark.parametrize("appends", CASES.values(), ids=CASES.keys())
def test_counts_links_and_lengths(appends):
    arena, texts, ends = grow(appends)
    counts = continuations(texts)
    for substring, followers in counts.items():
        edges = edges_of(arena, find(arena, substring))
        assert {token: count for token, (_, count) in edges.items()} == dict(followers), substring
    occurrences = defaultdict(set)
    for name, text in texts.items():
        for end in range(1, len(text) + 1):
            for start in range(end):
                occurrences[tuple(text[start:end])].add((name, end))
    for name, text in texts.items():
        state, length = ends[name], len(text)
        assert arena.states[state, LENGTH] >= length
        while state != arena.root:
            link = arena.states[state, LINK]
            longest, shorter = int(arena.states[state, LENGTH]), int(arena.states[link, LENGTH])
            assert shorter < longest
            if longest <= length:
                suffix = tuple(text[length - longest :])
                here = occurrences[suffix]
                assert occurrences[suffix[-(shorter + 1) :]] == here
                assert shorter == 0 or occurrences[suffix[-shorter:]] > here
            state = link


def test_long_text_is_linear_in_states_and_edges():
    arena, _, _ = grow(random_appends(1, 3, 50_000, 3))
    assert arena.sizes[0] <= 2 * 50_000
    assert arena.sizes[1] <= 3 * 50_000
