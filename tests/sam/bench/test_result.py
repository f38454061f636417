"""Go or no-go from the ratios of a few rounds."""

import pytest

from sam.bench.result import GO, NO_GO, NOISY, compared, median_interval


@pytest.mark.parametrize(
    ("ratios", "answer"),
    [
        ([1.03, 1.05, 1.04], GO),
        ([1.01, 1.38, 1.44], NOISY),  # one round gained nothing
        ([1.00, 1.01, 1.015], NO_GO),  # a gain, but not worth a setting
        ([1.38], NOISY),  # one round has no range
        ([*(1.30 + 0.01 * i for i in range(8)), 0.7], GO),  # of many rounds one may be disturbed
    ],
)
def test_the_rule(ratios, answer):
    assert compared([1.0] * len(ratios), ratios)["answer"] == answer


def test_interval_of_a_median_is_the_range_of_few_values_and_narrower_of_many():
    assert median_interval([float(v) for v in range(1, 7)]) == [3.5, 1.0, 6.0]
    # Published table: of 40 values the 14th and the 27th (96.2 %).
    assert median_interval([float(v) for v in range(1, 41)]) == [20.5, 14.0, 27.0]
