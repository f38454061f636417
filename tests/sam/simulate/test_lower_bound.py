"""The bound of routers that do not know lengths: where it can be worked out by hand, and that no router goes below."""

import numpy as np
import pytest

from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.reference.lower_bound import bound, compare, least_idle_steps, main


def test_with_one_slot_nothing_is_lost():
    lengths = LogNormal(102, 512, 0.6, 0.35)
    assert bound(lengths, 12, 16, slots=1, seed=0) == pytest.approx(1.0)


def test_idle_steps_of_equal_responses_are_the_largest_less_the_mean():
    """E[max of n] - E[one], against draws."""
    lengths, slots = LogNormal(102, 512, 0.6, 0.0), 8
    chance = np.random.default_rng(0)
    drawn = np.minimum(np.exp(lengths.mu + 0.6 * chance.standard_normal((100_000, slots))), 512)
    idle = least_idle_steps(lengths, 0.0, slots)
    assert idle[0] == pytest.approx((drawn.max(axis=1) - drawn.mean(axis=1)).mean(), rel=0.02)
    left = drawn[drawn > 100] - 100
    left = left[: len(left) // slots * slots].reshape(-1, slots)
    assert idle[100] == pytest.approx((left.max(axis=1) - left.mean(axis=1)).mean(), rel=0.02)


def test_no_router_without_lengths_is_below_and_the_oracle_is():
    found = compare(LogNormal(102, 512, 0.6, 0.35), 12, 16, Cluster(2, 12), seeds=12, chunks=[16])
    least = found.pop("bound").mean()
    oracle = found.pop("oracle").mean()
    assert 1.0 < oracle < least < 1.15
    for name in ("context", "context, chunks of 16", "verl"):
        assert found[name].mean() > least, name


def test_the_command_prints_every_router(capsys):
    assert main(["--seeds", "1", "--prompts", "3", "--samples", "8", "--max-num-seqs", "4", "--chunk", "32"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:4]] == ["bound", "oracle", "groups"]
    assert "context, chunks of 32" in out
    assert main(["--seeds", "1", "--prompts", "1", "--samples", "2"]) == 2
    assert "2 requests for 24 slots" in capsys.readouterr().err
