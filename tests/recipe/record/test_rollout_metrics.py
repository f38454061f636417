"""A step's metrics from the servers' records."""

import numpy as np
import pytest

from recipe.record.rollout_metrics import RolloutRecord
from sam.record.engine_steps import EngineSteps


def record(milliseconds=(10.0, 10.0, 30.0, 50.0), pauses=(0.0, 0.0, 0.0, 0.0), seconds=0.1, has_graphs=True):
    """A replica's record; `pauses` are seconds without work before each engine step."""
    ends = 1000.0 + np.cumsum(np.array(milliseconds) / 1e3 + np.array(pauses))
    steps = EngineSteps(
        end_s=ends, step_ms=milliseconds, running=[4, 4, 2, 1], drafted=[0, 0, 6, 3], accepted=[0, 0, 2, 1],
        emitted=[4, 4, 4, 2], position_steps=[2, 1], position_emitted=[4, 2], drafted_at=[3, 3, 3],
        accepted_at=[2, 1, 0], replayed=[True, False, True, True], has_graphs=has_graphs,
        draft_model_drafted_tokens=10, draft_model_accepted_tokens=5, counters={"draft_errors": 0},
    )  # fmt: skip
    return steps.to_bytes(), seconds


def plain(**columns):
    return EngineSteps(step_ms=[1.0], drafted_at=[0] * 3, accepted_at=[0] * 3, **columns).to_bytes(), 0.1


def metrics_of(*records, **settings):
    return RolloutRecord.merge(list(records)).metrics(**settings)


def test_metrics_add_up_over_the_replicas_that_record_them():
    metrics = metrics_of(record(), plain(asynchronous=True), record())
    expected = {
        "tokens": 28, "spec_accept_rate": 6 / 18, "spec_accept_length": 2.0, "spec_accept_rate/position_2": 1 / 3,
        "drafter/draft_errors": 0,
        "spec_draft_model_tokens": 20, "spec_draft_model_accept_rate": 0.5, "asynchronous_scheduling": 0.0,
    }  # fmt: skip
    assert {name: metrics[f"rollout/{name}"] for name in expected} == pytest.approx(expected)
    alone = metrics_of(plain(asynchronous=True))
    assert alone["rollout/asynchronous_scheduling"] == 1.0
    assert not any("draft_model" in name or "tail" in name for name in alone)
    alone = metrics_of(record())
    assert alone["rollout/other_ms_per_step"] == alone["rollout/step_ms_per_step"] == 25.0


def test_steps_that_replayed_a_graph_are_told_by_phase():
    names = [f"rollout/graph_share/{phase}" for phase in ("with_drafts", "without_drafts")]
    metrics = metrics_of(record(), record())
    assert metrics["rollout/steps_with_drafts"] == 4 and [metrics[name] for name in names] == [1.0, 0.5]
    metrics = metrics_of(record(), record(has_graphs=False))
    assert metrics["rollout/steps_with_drafts"] == 4 and not set(names) & set(metrics)
    metrics = metrics_of(plain(replayed=[True], has_graphs=True))
    assert names[0] not in metrics and metrics[names[1]] == 1.0


def test_tail_is_the_mean_of_the_replicas_and_its_share_of_their_time():
    metrics = metrics_of(record(milliseconds=(10.0, 10.0, 10.0, 10.0)), record(), tail_threshold=2)
    assert metrics["rollout/tail_seconds"] == pytest.approx((0.02 + 0.08) / 2)
    assert metrics["rollout/tail_share"] == pytest.approx((20 + 80) / (40 + 100))


def test_generation_rounds_are_told_apart_by_the_pauses_between_them():
    first = record(pauses=(0.0, 0.002, 1.5, 0.0), seconds=0.2)  # 2 ms is within a round
    second = record(pauses=(0.0, 0.0, 0.0, 2.0), seconds=0.4)
    rounds = {key: value for key, value in metrics_of(first, second, rounds=2).items() if "round_seconds" in key}
    # Of the slower replica: 10, 10 and 30 ms, then 80.
    expected = {"1": 0.05, "2": 0.08, "replica_mean": 0.15}
    assert rounds == pytest.approx({f"rollout/round_seconds/{name}": value for name, value in expected.items()})


def test_a_replica_without_a_part_in_every_round_tells_nothing_of_rounds():
    metrics = metrics_of(record(), rounds=2)
    assert "rollout/round_seconds/1" not in metrics
    assert metrics["rollout/round_seconds/replica_mean"] == pytest.approx(0.05)
