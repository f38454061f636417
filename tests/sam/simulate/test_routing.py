"""Which replica gets which request, and whose text its drafter sees."""

import numpy as np

from sam.simulate.routing import assign, siblings

PROMPTS = np.repeat(np.arange(6), 4)


def test_least_loaded_is_even_and_repeats_with_its_seed():
    for seed in range(5):
        replica_of = assign(PROMPTS, 5, "least-loaded", seed)
        assert sorted(np.bincount(replica_of).tolist()) == [4, 5, 5, 5, 5]
        assert np.array_equal(replica_of, assign(PROMPTS, 5, "least-loaded", seed))
    assert any((assign(PROMPTS, 5, "least-loaded", s) != replica_of).any() for s in range(4))


def test_prompt_keeps_samples_together_and_loads_even():
    replica_of = assign(PROMPTS, 3, "prompt")
    for prompt in range(6):
        assert len(set(replica_of[PROMPTS == prompt].tolist())) == 1
    assert np.bincount(replica_of).tolist() == [8, 8, 8]


def test_siblings_that_a_drafter_sees():
    prompts, replica_of = np.array([0, 0, 0, 1, 1]), np.array([0, 1, 0, 1, 0])
    assert siblings(prompts, replica_of, "least-loaded", "group").tolist() == [2, 1, 2, 1, 1]
    assert siblings(prompts, replica_of, "shared", "group").tolist() == [3, 3, 3, 2, 2]
    assert siblings(prompts, replica_of, "shared", "request").tolist() == [1] * 5
