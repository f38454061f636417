"""The parts of the device's self-test that need no engine."""

from recipe.preflight.npu.selftest import operations, recommend


def test_every_operation_runs_on_a_cpu():
    rows = operations("cpu", batch=1)
    assert all(row["median_ms"] > 0 for row in rows.values()), rows
    assert recommend(rows).startswith("keep speculation.verification=exact")


def test_the_faster_verification_is_recommended_and_the_one_that_runs():
    slow, fast, broken = {"median_ms": 50.0}, {"median_ms": 5.0}, {"error": "RuntimeError: no kernel"}
    names = ("exact verification, whole", "rejection sampling, whole")
    for exact, rejection, wanted in (
        (slow, fast, "is faster, but its tokens differ"),
        (fast, slow, "keep speculation.verification=exact"),
        (slow, broken, "keep speculation.verification=exact"),
        (broken, fast, "set speculation.verification=rejection"),
    ):
        assert wanted in recommend(dict(zip(names, (exact, rejection), strict=True)))
