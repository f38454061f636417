"""The requests of a round."""

import argparse

import numpy as np
import pytest

from recipe.routing_bench.results import Variant
from recipe.routing_bench.rounds import prompts_of, variants_of
from recipe.routing_bench.work import lengths_of, make_work, recorded_lengths
from sam.record.responses import Recording


def recording(*lengths):
    texts = [[np.zeros(length, np.int32) for length in samples] for samples in lengths]
    return Recording([np.zeros(3, np.int32)] * len(texts), texts)


def test_recorded_lengths_are_scaled_by_one_factor():
    """The longest has the cap; no response is empty, and those that were are left out."""
    recorded = recording((400, 40, 1), (0, 100, 200, 7), (5,), (4, 80, 8))
    assert recorded_lengths(recorded, groups=2, samples=2, cap=100, round_=0) == [100, 10, 25, 50]
    assert recorded_lengths(recorded, groups=2, samples=2, cap=100, round_=1) == [1, 20, 100, 10]


def test_a_recording_with_too_few_responses_is_refused(tmp_path):
    path = tmp_path / "short.npz"
    np.savez(
        path,
        prompt_tokens=np.zeros(2, np.int32),
        prompt_offsets=np.arange(3),
        response_tokens=np.zeros(5, np.int32),
        response_offsets=np.array([0, 1, 2, 5]),
        response_prompt=np.array([0, 0, 1]),
    )
    options = argparse.Namespace(lengths=path, groups=2, samples=2, cap=512)
    with pytest.raises(ValueError, match="--lengths: 1 prompts with 2 responses or more: expected the 2 of --groups"):
        lengths_of(options)
    options.groups = 1
    assert lengths_of(options)(3) == ([512, 512], None)


def test_drawn_lengths_come_with_the_means_of_an_earlier_epoch():
    options = argparse.Namespace(lengths=None, mean=102, cap=1367, sigma=1.0, correlation=0.35, groups=3, samples=4)
    lengths, expected = lengths_of(options)(1)
    assert len(lengths) == 12 and [expected[i] for i in (0, 4, 8)] == sorted({*expected}, key=expected.index)
    assert expected != [expected[0]] * 12
    assert lengths_of(options)(1) == (lengths, expected) != lengths_of(options)(2)


def test_no_two_prompts_share_seeds():
    options = argparse.Namespace(groups=2, samples=3)
    work = make_work(options, [[7], [8], [9]], ([5] * 6, None), first_prompt=2)
    assert work.prompts == [[9]] * 3 + [[7]] * 3, "from the first prompt again after the last"
    again = make_work(options, [[7], [8], [9]], ([5] * 6, None), first_prompt=4)
    assert len({*work.seeds, *again.seeds}) == 12


def test_variants_that_draft_have_prompts_of_their_own():
    options = argparse.Namespace(chunk=[64], engines=["off", "shared"], lengths=None)
    sets = prompts_of(variants_of(options))
    off = {name for name, number in sets.items() if number == 0}
    assert off == {"verl", "context", "context, chunks of 64", "context, an epoch before", "oracle's order"}
    drafting = [number for name, number in sets.items() if name not in off]
    assert sorted(drafting) == [1, 2, 3, 4]
    options.lengths = "recording.npz"
    assert not any(variant.router == "history" for variant in variants_of(options))
    assert prompts_of([Variant("verl", "verl")]) == {"verl": 0}
