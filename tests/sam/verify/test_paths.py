"""Several paths verified at once: the tokens of sampling one after the other, whatever the paths are."""

import numpy as np
import torch

from sam.verify import PLACEHOLDER, follow_paths

NO_DRAFT = -2
REQUESTS, PATHS, DEPTH, VOCABULARY = 2000, 3, 3, 3


def test_tokens_are_those_of_one_after_the_other_as_far_as_a_path_agrees():
    """`drawn`: what a request draws at each position, by the token before it."""
    chance, each = np.random.default_rng(0), np.arange(REQUESTS)
    drawn = chance.integers(0, VOCABULARY, (REQUESTS, DEPTH + 1, VOCABULARY))
    text = np.zeros((REQUESTS, DEPTH + 2), int)  # after a first token 0
    for position in range(DEPTH + 1):
        text[:, position + 1] = drawn[each, position, text[:, position]]
    drafts = chance.integers(0, VOCABULARY, (REQUESTS, PATHS, DEPTH + 1))
    before = np.concatenate([np.zeros((REQUESTS, PATHS, 1), int), drafts[:, :, :-1]], axis=2)
    sampled = drawn[each[:, None, None], np.arange(DEPTH + 1), before]
    ends = np.arange(DEPTH + 1) >= chance.integers(0, DEPTH + 1, (REQUESTS, PATHS, 1))  # of drafts of any length
    drafts[ends] = NO_DRAFT
    sampled[:, :, 1:][ends[:, :, :-1]] = PLACEHOLDER
    # Rows of a batch stand in any order, and some requests have fewer.
    order = chance.permutation(REQUESTS * PATHS)
    rows = np.argsort(order).reshape(REQUESTS, PATHS)
    rows[chance.random(REQUESTS) < 0.2, PATHS - 1] = -1
    flat = (torch.from_numpy(one.reshape(-1, DEPTH + 1)[order]) for one in (sampled, drafts))
    found = follow_paths(*flat, torch.from_numpy(rows)).tokens.numpy()
    agreeing = ((drafts == text[:, None, 1:]) & (rows >= 0)[:, :, None]).cumprod(axis=2).sum(axis=2).max(axis=1)
    assert np.array_equal(found, np.where(np.arange(DEPTH + 1) <= agreeing[:, None], text[:, 1:], PLACEHOLDER))
    assert set(agreeing.tolist()) == set(range(DEPTH + 1))


def test_rows_and_the_last_one_are_those_that_the_tokens_come_from():
    """Request 0 goes on along its third row, request 1 along its own draft."""
    sampled = torch.tensor([[5, 9, -1], [5, 8, 7], [5, 6, 7], [3, 2, -1]])
    drafts = torch.tensor([[4, NO_DRAFT, NO_DRAFT], [6, 8, NO_DRAFT], [5, 6, NO_DRAFT], [3, NO_DRAFT, NO_DRAFT]])
    found = follow_paths(sampled, drafts, torch.tensor([[0, 1, 2], [3, -1, -1]]))
    assert found.tokens.tolist() == [[5, 6, 7], [3, 2, -1]]
    assert found.rows[0].tolist() == [0, 2, 2] and found.rows[1, :2].tolist() == [3, 3]
    assert found.last.tolist() == [2, 0]
    # A token is taken from the first row that agrees, also where rows that should agree do not, as rounding may make it
    # on a device: no draw is chosen by its value.
    sampled, drafts = torch.tensor([[5, 6], [4, 7]]), torch.tensor([[5, NO_DRAFT], [5, NO_DRAFT]])
    for order, tokens in (([0, 1], [[5, 6]]), ([1, 0], [[4, -1]])):
        assert follow_paths(sampled, drafts, torch.tensor([order])).tokens.tolist() == tokens
