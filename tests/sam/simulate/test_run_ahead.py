"""What `python -m tests.run_ahead` prints of text written ahead, on rollouts of few tokens."""

import numpy as np
import pytest

from sam.simulate import workload
from tests import run_ahead

UPLIFT = {3: (1, 1.055, 1.091, 1.136, 1.188), 8: (1, 1.069, 1.115, 1.172, 1.241)}  # measured on a recording


def test_it_prints_a_line_of_each_variant(capsys):
    run_ahead.main(["--setup", "qwen3_32b", "--rounds", "1", "--scale", "2048"])
    ahead, free = capsys.readouterr().out.splitlines()
    assert ahead.startswith("qwen3_32b, ahead: ") and free.startswith("qwen3_32b, free: ")
    assert free.endswith("8.0 responses")


@pytest.mark.parametrize("k", UPLIFT)
def test_more_earlier_text_is_accepted_as_measured(k):
    accepted = workload.shipped_acceptance(k).accepted
    likelier = run_ahead.EarlierDrafts(k, np.zeros((1, 8)), np.zeros(1, int), 0).likelier
    for times, records in zip(UPLIFT[k], np.moveaxis(likelier, -1, 0), strict=True):
        more = np.take_along_axis(accepted, records, axis=-1)
        assert more.mean() == pytest.approx(times * accepted.mean(), rel=0.01)
