"""Several paths verified at once: the tokens of sampling one after the other, whatever the paths are."""

import numpy as np
import torch

from sam.verify import PLACEHOLDER, follow_paths, sample_inverse_cdf
from sam.verify.exact import uniforms

NO_DRAFT = -2
VOCABULARY, DEPTH, PATHS = 4, 3, 3


def next_tokens(seed=0):
    """float64 [token before, token], a distribution after each token."""
    return np.random.default_rng(seed).dirichlet(np.ones(VOCABULARY), VOCABULARY)


def step(distribution, last, position, keys, generator):
    """One step of requests that each have a draft and further paths, some shorter, some that begin alike.

    Args:
        last: int [requests], last tokens; position: int, of the first token to be drawn.

    Returns:
        sampled, drafts, rows as follow_paths takes them.
    """
    requests = len(last)
    tree = generator.integers(0, VOCABULARY, (requests, PATHS, DEPTH))
    shared = generator.integers(0, DEPTH, (requests, PATHS))
    tree = np.where(np.arange(DEPTH) < shared[:, :, None], tree[:, :1], tree)
    lengths = generator.integers(1, DEPTH + 1, (requests, PATHS))
    lengths[:, 0] = DEPTH
    drafts = np.full((requests, PATHS, DEPTH + 1), NO_DRAFT)
    drafts[:, :, :DEPTH] = np.where(np.arange(DEPTH) < lengths[:, :, None], tree, NO_DRAFT)
    before = np.concatenate([np.broadcast_to(last[:, None, None], (requests, PATHS, 1)), tree], axis=2)
    at = np.broadcast_to(position + np.arange(DEPTH + 1), before.shape)
    draws = uniforms(np.broadcast_to(keys[:, None, None], before.shape).ravel(), at.ravel())
    logits = torch.from_numpy(np.log(distribution[before.ravel()])).to(torch.float32)
    sampled = sample_inverse_cdf(logits, torch.from_numpy(draws)).reshape(before.shape)
    sampled[torch.from_numpy(np.arange(DEPTH + 1) > lengths[:, :, None])] = PLACEHOLDER
    # Rows of a batch stand in any order, and some requests have fewer.
    order = generator.permutation(requests * PATHS)
    rows = np.argsort(order).reshape(requests, PATHS)
    flat = sampled.reshape(-1, DEPTH + 1)[order], torch.from_numpy(drafts.reshape(-1, DEPTH + 1)[order])
    rows[generator.random(requests) < 0.2, PATHS - 1] = -1
    return *flat, torch.from_numpy(rows)


def written(distribution, requests, length, seed):
    """int [requests, length], texts that begin after token 0, and how many tokens each step brought."""
    generator, keys = np.random.default_rng(seed), np.arange(requests) + (seed << 32)
    texts, each = [[] for _ in range(requests)], []
    for i in range(length):  # every step brings one token at least
        live = [r for r in range(requests) if len(texts[r]) == i]
        if not live:
            continue
        last = np.array([texts[r][-1] if texts[r] else 0 for r in live])
        found = follow_paths(*step(distribution, last, i, keys[live], generator))
        for r, tokens in zip(live, found.tokens.tolist(), strict=True):
            kept = [token for token in tokens if token != PLACEHOLDER]
            assert tokens == kept + [PLACEHOLDER] * (DEPTH + 1 - len(kept))
            texts[r] += kept
            each.append(len(kept))
    return np.array([text[:length] for text in texts]), np.array(each)


def one_after_the_other(distribution, requests, length, seed):
    """The same texts, drawn token by token with the same uniforms."""
    keys, texts = np.arange(requests) + (seed << 32), np.zeros((requests, length), int)
    last = np.zeros(requests, int)
    for i in range(length):
        logits = torch.from_numpy(np.log(distribution[last])).to(torch.float32)
        last = texts[:, i] = sample_inverse_cdf(logits, torch.from_numpy(uniforms(keys, np.full(requests, i)))).numpy()
    return texts


def test_tokens_are_those_of_sampling_one_after_the_other():
    distribution = next_tokens()
    texts, each = written(distribution, 2000, 6, seed=1)
    assert np.array_equal(texts, one_after_the_other(distribution, 2000, 6, seed=1))
    assert each.mean() > 1.4 and each.max() == DEPTH + 1  # paths were followed, to their ends


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
