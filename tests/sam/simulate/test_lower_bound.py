"""The bound of routers that do not know lengths: where it can be worked out by hand, and that no router goes below."""

import numpy as np
import pytest

from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.reference.lower_bound import Figures, bound, compare, least_idle_steps, main, told
from tests.sam.simulate.test_engine import work


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
    least = found.pop("bound").steps.mean()
    oracle = found.pop("oracle").steps.mean()
    assert 1.0 < oracle < least < 1.15
    for name in ("told before", "told once slots are full", "context", "context, chunks of 16", "verl"):
        assert found[name].steps.mean() > least, name


def test_who_is_told_the_lengths_of_prompts_starts_the_longest_first():
    """Two slots. Told before: 9 and 9 of the second prompt, then 2 and 3. Told late: 2 and 9 first, then 9, then 3."""
    one = work(2, 3, 9, 9, prompts=[0, 0, 1, 1])
    common = np.array([-1.0, 1.0])
    assert told(one, common, slots=2, blind=False).tolist() == [11, 12, 9, 9]
    assert told(one, common, slots=2, blind=True).tolist() == [2, 12, 9, 11]


def test_the_tail_is_the_time_with_fewer_than_half_of_the_slots_busy():
    """Four slots, 20 tokens in 5 steps at best: from step 6 on only one response is left, and it takes 4 more."""
    one = work(2, 2, 6, 10, prompts=range(4))
    figures = Figures.of([one], [np.array([2.0, 2.0, 6.0, 10.0])], slots=4)
    assert (figures.steps.item(), figures.tails.item()) == (10 / 5, 4 / 5)


def test_knowing_more_leaves_less_of_the_tail():
    found = compare(LogNormal(102, 1367, 1.0, 0.35), 12, 16, Cluster(2, 12), seeds=12, chunks=[])
    names = "oracle", "told before", "told once slots are full", "context", "verl"
    tails = [found[name].tails.sum() for name in names]
    assert tails == sorted(tails)


def test_the_command_prints_every_router(capsys):
    assert main(["--seeds", "1", "--prompts", "3", "--samples", "8", "--max-num-seqs", "4", "--chunk", "32"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:6]] == ["bound", "told", "told", "oracle", "groups"]
    assert out.splitlines()[0].split()[-2:] == ["over", "verl's"]
    assert "1.00x  1.00x  1.00x  1.00x" in next(line for line in out.splitlines() if line.startswith("verl"))
    assert "context, chunks of 32" in out
    assert main(["--seeds", "1", "--prompts", "1", "--samples", "2"]) == 2
    assert "2 requests for 24 slots" in capsys.readouterr().err
