"""Go or no-go from the ratios of a few rounds."""

import pytest

from sam.bench.verdict import GO, NO_GO, NOISY, decide, median_interval


@pytest.mark.parametrize(
    "ratios, answer",
    [
        ([1.31, 1.38, 1.44], GO),
        ([1.03, 1.05, 1.04], GO),
        ([1.01, 1.38, 1.44], NOISY),  # one round gained nothing
        ([0.95, 0.97, 1.01], NO_GO),
        ([1.00, 1.01, 1.015], NO_GO),  # a gain, but not worth a setting
        ([0.90, 0.97, 1.20], NOISY),
        ([1.38], NOISY),  # one round has no range
        ([0.50, 0.50], NOISY),
    ],
)
def test_the_rule(ratios, answer):
    assert decide(ratios).answer == answer


def test_many_rounds_may_have_a_disturbed_one():
    rounds = [1.30 + 0.01 * i for i in range(8)]
    assert decide([*rounds, 0.7]).answer == GO
    assert decide([*rounds[:4], 0.7]).answer == NOISY


def test_lines():
    assert decide([1.31, 1.38, 1.44]).line(4) == "go: 1.38x (1.31-1.44) at 4 requests"
    assert decide([0.95, 0.97, 1.01]).line(24) == "no-go: 0.97x (0.95-1.01) at 24 requests"
    noisy = decide([0.9, 1.2, 1.1]).line(1)
    assert noisy == "too noisy to tell: 0.90x-1.20x at 1 request, 3 more rounds (--rounds 6 --resume)"


def test_interval_of_a_median_is_the_range_of_few_values_and_narrower_of_many():
    assert median_interval([3.0, 1.0, 2.0]) == [2.0, 1.0, 3.0]
    assert median_interval([float(v) for v in range(1, 7)]) == [3.5, 1.0, 6.0]
    # Published tables: of 20 values the 6th and the 15th (95.9 %), of 40 the 14th and the 27th (96.2 %).
    assert median_interval([float(v) for v in range(1, 21)]) == [10.5, 6.0, 15.0]
    assert median_interval([float(v) for v in range(1, 41)]) == [20.5, 14.0, 27.0]
