"""A step's metrics from the servers' records."""

import io

import numpy as np
import pytest

from recipe.rollout_record import RolloutRecord


def record(running=(4, 4, 2, 1), milliseconds=(10.0, 10.0, 30.0, 50.0)):
    steps = len(running)
    arrays = {name: np.zeros(steps) for name in ("forward_ms", "verify_ms", "draft_ms", "drafting")}
    arrays |= {
        "step_ms": np.array(milliseconds), "running": np.array(running),
        "drafted": np.array([0, 0, 6, 3]), "accepted": np.array([0, 0, 2, 1]), "emitted": np.array([4, 4, 4, 2]),
        "position_steps": np.array([2, 1]), "position_emitted": np.array([4, 2]),
        "drafted_at": np.array([3, 3, 3]), "accepted_at": np.array([2, 1, 0]), "counter_faults": np.array(0),
    }  # fmt: skip
    blob = io.BytesIO()
    np.savez(blob, **arrays)
    return blob.getvalue(), 0.1


def test_metrics_add_up_over_replicas():
    metrics = RolloutRecord.merge([record(), record()]).metrics()
    assert metrics["rollout/tokens"] == 28
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(6 / 18)
    assert metrics["rollout/spec_accept_length"] == 2.0
    assert metrics["rollout/spec_accept_rate/position_2"] == pytest.approx(1 / 3)
    assert metrics["rollout/drafter/faults"] == 0


def test_timeline_is_over_time_not_over_steps():
    metrics = RolloutRecord.merge([record()]).metrics()
    timeline = [metrics[f"rollout/running_requests/at_{percent}_percent"] for percent in range(10, 100, 10)]
    assert timeline == [4, 4, 2, 2, 2, 1, 1, 1, 1]
