"""The parts of the device's self-test that need no engine."""

import pytest

from recipe.preflight.npu_selftest import recommend, verifications

SLOW, FAST, BROKEN = {"median_ms": 50.0}, {"median_ms": 5.0}, {"error": "RuntimeError: no kernel"}


def test_both_verifications_run_on_a_cpu():
    rows = verifications("cpu", batch=1)
    assert all(row["median_ms"] > 0 for row in rows.values()), rows


@pytest.mark.parametrize(
    ("exact", "rejection", "wanted"),
    [
        (SLOW, FAST, "is faster, but its tokens differ"),
        (FAST, SLOW, "keep speculation.verification=exact"),
        (SLOW, BROKEN, "keep speculation.verification=exact"),
        (BROKEN, FAST, "set speculation.verification=rejection"),
    ],
)
def test_the_faster_verification_is_recommended_and_the_one_that_runs(exact, rejection, wanted):
    assert wanted in recommend({"exact": exact, "rejection": rejection})
