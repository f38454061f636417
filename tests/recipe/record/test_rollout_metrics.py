"""A step's metrics from the servers' records."""

import numpy as np
import pytest

from recipe.record.rollout_metrics import RolloutRecord, rejected_seconds, token_milliseconds
from recipe.report.timeline import over_time
from sam.drafting.origins import SOURCES
from sam.record.engine_steps import EngineSteps


def record(
    running=(4, 4, 2, 1),
    milliseconds=(10.0, 10.0, 30.0, 50.0),
    pauses=(0.0, 0.0, 0.0, 0.0),
    seconds=0.1,
    has_graphs=True,
):
    """A replica's record; `pauses` are seconds without work before each engine step."""
    ends = 1000.0 + np.cumsum(np.array(milliseconds) / 1e3 + np.array(pauses))
    steps = EngineSteps(
        end_s=ends, step_ms=milliseconds, running=running, drafted=[0, 0, 6, 3], accepted=[0, 0, 2, 1],
        emitted=[4, 4, 4, 2], position_steps=[2, 1], position_emitted=[4, 2], drafted_at=[3, 3, 3],
        accepted_at=[2, 1, 0], replayed=[True, False, True, True], has_graphs=has_graphs,
        source_drafted=[4, 2, 1, 1, 1, 1], source_accepted=[3, 0, 1, 1, 0, 1],
        draft_model_drafted_tokens=10, draft_model_accepted_tokens=5, counters={"draft_errors": 0},
    )  # fmt: skip
    return steps.to_bytes(), seconds


def test_metrics_add_up_over_replicas():
    metrics = RolloutRecord.merge([record(), record()]).metrics()
    assert metrics["rollout/tokens"] == 28
    assert metrics["rollout/spec_accept_rate"] == pytest.approx(6 / 18)
    assert metrics["rollout/spec_accept_length"] == 2.0
    assert metrics["rollout/spec_accept_rate/position_2"] == pytest.approx(1 / 3)
    assert metrics["rollout/drafter/draft_errors"] == 0


def test_draft_tokens_by_source_add_up_over_the_replicas_that_count_them():
    uncounted = EngineSteps(step_ms=[1.0], drafted_at=[0] * 3, accepted_at=[0] * 3).to_bytes(), 0.1
    metrics = RolloutRecord.merge([record(), uncounted, record()]).metrics()
    assert metrics["rollout/spec_source_tokens"] == 20
    assert metrics["rollout/spec_source_share/own"] == pytest.approx(8 / 20)
    assert metrics["rollout/spec_source_accept_rate/own"] == pytest.approx(3 / 4)
    assert metrics["rollout/spec_source_accept_rate/sibling_here"] == 0.0
    assert sum(metrics[f"rollout/spec_source_share/{source}"] for source in SOURCES) == pytest.approx(1.0)
    assert not any("source" in name for name in RolloutRecord.merge([uncounted]).metrics())


def test_a_draft_models_acceptance_is_that_of_the_step_and_of_all_replicas():
    parts = [(30, 12), (10, 8), (0, 0)]
    blobs = [EngineSteps(step_ms=[1.0], draft_model_drafted_tokens=n, draft_model_accepted_tokens=m) for n, m in parts]
    metrics = RolloutRecord.merge([(blob.to_bytes(), 0.1) for blob in blobs]).metrics()
    assert metrics["rollout/spec_draft_model_tokens"] == 40
    assert metrics["rollout/spec_draft_model_accept_rate"] == pytest.approx(0.5)
    assert not any("draft_model" in name for name in RolloutRecord.merge([(blobs[2].to_bytes(), 0.1)]).metrics())


def test_scheduling_is_asynchronous_where_every_replica_is():
    one, other = (EngineSteps(step_ms=[1.0], asynchronous=one).to_bytes() for one in (True, False))
    for replicas, expected in (([one, one], 1.0), ([one, other], 0.0)):
        metrics = RolloutRecord.merge([(blob, 0.1) for blob in replicas]).metrics()
        assert metrics["rollout/asynchronous_scheduling"] == expected


def test_steps_that_replayed_a_graph_are_told_by_phase():
    names = [f"rollout/graph_share/{phase}" for phase in ("with_drafts", "without_drafts")]
    metrics = RolloutRecord.merge([record(), record()]).metrics()
    assert metrics["rollout/steps_with_drafts"] == 4
    assert [metrics[name] for name in names] == [1.0, 0.5]
    for replicas in ([record(has_graphs=False)], [record(), record(has_graphs=False)]):
        metrics = RolloutRecord.merge(replicas).metrics()
        assert metrics["rollout/steps_with_drafts"] == 2 * len(replicas)
        assert not set(names) & set(metrics)
    plain = EngineSteps(step_ms=[1.0] * 4, replayed=[True, True, True, False], has_graphs=True)
    metrics = RolloutRecord.merge([(plain.to_bytes(), 0.1)]).metrics()
    assert names[0] not in metrics and metrics[names[1]] == 0.75


def test_timeline_is_over_time_not_over_steps():
    metrics = RolloutRecord.merge([record()]).metrics()
    timeline = [metrics[f"rollout/running_requests/at_{percent}_percent"] for percent in range(10, 100, 10)]
    assert timeline == [4, 4, 2, 2, 2, 1, 1, 1, 1]


def test_tail_is_the_mean_of_the_replicas_and_its_share_of_their_time():
    fast, slow = record(milliseconds=(10.0, 10.0, 10.0, 10.0)), record()
    metrics = RolloutRecord.merge([fast, slow]).metrics(tail_threshold=2)
    assert metrics["rollout/tail_seconds"] == pytest.approx((0.02 + 0.08) / 2)
    assert metrics["rollout/tail_share"] == pytest.approx((20 + 80) / (40 + 100))
    assert not any("tail" in name for name in RolloutRecord.merge([fast]).metrics())


def test_generation_rounds_are_told_apart_by_the_pauses_between_them():
    first = record(pauses=(0.0, 0.002, 1.5, 0.0), seconds=0.2)  # 2 ms is within a round
    second = record(pauses=(0.0, 0.0, 0.0, 2.0), seconds=0.4)
    metrics = RolloutRecord.merge([first, second]).metrics(rounds=2)
    assert metrics["rollout/round_seconds/1"] == pytest.approx(0.05)  # of the slower replica: 10, 10 and 30 ms
    assert metrics["rollout/round_seconds/2"] == pytest.approx(0.08)
    assert metrics["rollout/round_seconds/replica_mean"] == pytest.approx(0.15)
    assert "rollout/round_seconds/3" not in metrics


def test_a_replica_without_a_part_in_every_round_tells_nothing_of_rounds():
    metrics = RolloutRecord.merge([record()]).metrics(rounds=2)
    assert "rollout/round_seconds/1" not in metrics
    assert metrics["rollout/round_seconds/replica_mean"] == pytest.approx(0.05)


def test_what_rejected_drafts_took_is_their_share_of_the_steps_time():
    running, drafted = np.array([8, 8, 4, 4, 2, 1]), np.array([0, 16, 0, 8, 4, 3])
    milliseconds = 5.0 + 0.5 * running + 0.25 * drafted
    steps = EngineSteps(step_ms=milliseconds, running=running, drafted=drafted, accepted=drafted // 2)
    assert token_milliseconds(steps) == pytest.approx(0.25)
    assert rejected_seconds(steps) == pytest.approx(0.25 * (31 - 15) / 1e3)
    assert rejected_seconds(EngineSteps(step_ms=milliseconds, running=running)) == 0.0
    metrics = RolloutRecord.merge([record(), record()]).metrics()
    assert metrics["rollout/other_ms_per_step"] == metrics["rollout/step_ms_per_step"] == 25.0
    one = EngineSteps.from_bytes(record()[0])
    assert metrics["rollout/rejected_seconds"] == pytest.approx(rejected_seconds(one)) and rejected_seconds(one) > 0


def test_columns_over_time_keep_their_totals():
    steps = EngineSteps(step_ms=[10.0, 30.0, 60.0], running=[5, 3, 1])
    time, means = over_time(steps, {"running": steps.running})
    assert time[-1] == pytest.approx(0.1)
    assert means["running"].mean() == pytest.approx((5 * 10 + 3 * 30 + 1 * 60) / 100)
    assert means["running"][[0, -1]] == pytest.approx([5, 1])
