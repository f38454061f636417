"""Prompt lookup and REST draft what their papers' rules say."""

import numpy as np
import pytest

from sam.replay.baselines import make_drafter
from sam.replay.peers import Rest, look_up, retrieve, suffix_array


def published_rule(text, budget, longest=3):
    """Prompt lookup's rule as its authors state it: windows, in order; whole drafts only; no match with itself."""
    for size in range(longest, 0, -1):
        for begin in range(len(text) - size + 1):
            start, end = begin + size, begin + size + budget
            if text[begin:start] == text[-size:] and end <= len(text) and start < len(text) - size:
                return text[start:end]
    return []


def test_prompt_lookup_is_the_published_rule():
    rng = np.random.default_rng(0)
    drafted = 0
    for _ in range(300):
        text = rng.integers(0, 6, int(rng.integers(4, 40))).astype(np.int32)
        budget = int(rng.integers(1, 6))
        start = look_up(text, budget, 3)
        assert text[start : start + budget].tolist() == published_rule(text.tolist(), budget)
        drafted += start < len(text)
    assert drafted > 100


def test_prompt_lookup_takes_one_token_where_vllms_ngram_takes_none():
    text = np.array([1, 2, 3, 4, 5, 1], np.int32)
    drafts = []
    for name in ("pld", "ngram"):
        drafter = make_drafter(name, "request", 2)
        drafter.start("a", text)
        drafts.append(drafter.draft(["a"], np.array([2])).token_ids.tolist())
    assert drafts == [[2, 3], []]


def test_suffix_array_is_in_order():
    data = np.random.default_rng(0).integers(0, 3, 200).astype(np.int32)
    order = suffix_array(data).tolist()
    assert sorted(order) == list(range(200))
    # Compared by 32 tokens.
    keys = [data[i : i + 32].tolist() for i in order]
    assert keys == sorted(keys)


def most_frequent(texts, text, budget):
    """REST's rule by counting: the longest suffix of 16 to 2 tokens in any text, then the commonest next token."""
    for size in range(min(16, len(text)), 1, -1):
        tails = [t[i + size :] for t in texts for i in range(len(t) - size + 1) if t[i : i + size] == text[-size:]]
        if not tails:
            continue
        draft = []
        while len(draft) < budget and (tails := [tail for tail in tails if tail]):
            heads = [tail[0] for tail in tails]
            best = min(set(heads), key=lambda token: (-heads.count(token), token))
            draft.append(best)
            tails = [tail[1:] for tail in tails if tail[0] == best]
        return draft
    return []


def test_rest_drafts_the_most_frequent_continuation_of_the_longest_suffix():
    rng = np.random.default_rng(1)
    texts = [rng.integers(0, 5, 60).tolist() for _ in range(4)]
    rest = Rest([np.array(text, np.int32) for text in texts])
    lengths = set()
    for _ in range(200):
        begin = int(rng.integers(0, 58))
        text = rng.integers(0, 5, 3).tolist() + texts[int(rng.integers(4))][begin : begin + int(rng.integers(2, 20))]
        draft = retrieve(rest._data, rest._suffixes, np.array(text, np.int32), 4).tolist()
        assert draft == most_frequent(texts, text, 4)
        lengths.add(len(draft))
    assert 4 in lengths and min(lengths) < 4


def test_rest_without_a_datastore_is_one_line():
    with pytest.raises(ValueError, match="--datastore"):
        make_drafter("rest", "request", 3)
