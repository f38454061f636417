"""Uniforms: uniform, independent of each other's inputs, the same everywhere."""

import numpy as np
from scipy import stats

from sam.verify.exact import rng_key, uniforms


def test_keys_come_from_the_seed_or_from_engine_and_request():
    assert rng_key(7, 0, "a") == rng_key(7, 1, "b")
    keys = {
        rng_key(7, 0, "a"),
        rng_key(8, 0, "a"),
        rng_key(None, 0, "a"),
        rng_key(None, 0, "b"),
        rng_key(None, 1, "a"),
    }
    assert len(keys) == 5 and all(0 <= key < 2**63 for key in keys)


def test_uniform_over_keys_and_over_positions():
    many = np.arange(200_000)
    for values in (uniforms(many, np.zeros_like(many)), uniforms(np.full_like(many, 5), many)):
        assert 0 < values.min() and values.max() < 1
        assert stats.kstest(values, "uniform").pvalue > 1e-3


def test_neighbours_and_streams_are_uncorrelated():
    keys, positions = np.full(200_000, 3), np.arange(200_000)
    one, other = uniforms(keys, positions), uniforms(keys, positions, stream=1)
    neighbour = uniforms(keys + 1, positions)
    for x, y in ((one[:-1], one[1:]), (one, other), (one, neighbour)):
        assert abs(np.corrcoef(x, y)[0, 1]) < 4 / np.sqrt(len(x))


def test_same_values_on_every_machine():
    expected = [0.3681895156516696, 0.8160564352416809]
    assert uniforms(np.array([1, 2]), np.array([0, 5])).tolist() == expected
