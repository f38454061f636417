"""Engine steps on disk and between processes; files replaced whole."""

import io
import math

import numpy as np
import pytest

from sam.reading import ReadError
from sam.record import replacing
from sam.record.engine_steps import PER_STEP, EngineSteps


def test_what_is_saved_is_loaded(tmp_path):
    columns = {name: np.arange(5).astype(dtype) for name, dtype in PER_STEP.items()}
    histograms = {"drafted_at": [3, 1], "accepted_at": [2, 0], "turn_steps": [2, 1, 0, 0], "turn_emitted": [4, 2, 0, 0]}
    steps = EngineSteps(**columns, **histograms, preemptions=3, counters={"draft_errors": 2, "sharing_engine_ms": 0.5})
    (tmp_path / "engine_steps").mkdir()
    steps.save(tmp_path, 3)
    assert [file.name for file in tmp_path.rglob("*.*")] == ["3.npz"]
    loaded = EngineSteps.load(tmp_path, 3)
    for name in (*columns, *histograms):
        kept, found = getattr(steps, name), getattr(loaded, name)
        assert kept.dtype == found.dtype and kept.tolist() == found.tolist(), name
    assert (loaded.preemptions, loaded.counters) == (3, {"draft_errors": 2, "sharing_engine_ms": 0.5})


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("running", [[3, 2, 1]], "running: expected 1-dimensional integers, got int64 of shape [1, 3]"),
        ("running", 3, "running: expected 1-dimensional integers, got int64 of shape []"),
        ("drafted", [1, math.nan, 1], "drafted: expected 1-dimensional integers, got float64 of shape [3]"),
        ("drafting", ["a", "b", "c"], "drafting: expected 1-dimensional booleans, got <U1 of shape [3]"),
        ("emitted", [1, 2**40, 1], "emitted[1]: expected a figure of a step, 0 to 2147483647, got 1099511627776"),
        ("step_ms", [1, 2, math.nan], "step_ms[2]: expected a figure of a step, 0 to 3.4"),
        ("accepted", [0, 0], "not engine steps (engine steps: columns of lengths"),
        ("accepted_at", [1, 1], "turn_emitted: expected two of one length, two of 4 or of none, got [1, 2, 4, 4]"),
        ("preemptions", [1], "preemptions: expected 0-dimensional integers, got int64 of shape [1]"),
        ("counter_draft_errors", math.nan, "counter_draft_errors: expected a sum"),
        ("step_ms", None, "expected step_ms and running among its arrays, got ["),
    ],
)
def test_what_is_no_array_of_a_step_is_one_line(tmp_path, name, value, said):
    steps = EngineSteps(step_ms=[1, 2, 3], running=[3, 2, 1], drafted_at=[1], accepted_at=[1], turn_steps=[1] * 4,
                        turn_emitted=[1] * 4, counters={"draft_errors": 0})  # fmt: skip
    with np.load(io.BytesIO(steps.to_bytes())) as file:
        arrays = dict(file) | {name: value}
    (tmp_path / "engine_steps").mkdir()
    kept = {key: array for key, array in arrays.items() if array is not None}
    np.savez(path := EngineSteps.path(tmp_path, 1), **kept)
    with pytest.raises(ReadError) as refused:
        EngineSteps.load(tmp_path, 1)
    assert str(path) in str(refused.value) and said in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    (target := tmp_path / "state.json").write_text("old")
    with pytest.raises(OSError, match="disk full"), replacing(target) as partial:
        partial.write_text("half")
        raise OSError("disk full")
    assert target.read_text() == "old" and list(tmp_path.iterdir()) == [target]


def test_the_tail_begins_where_running_requests_stay_few():
    for running, tail in (
        ([1, 3, 5, 4, 2, 1], [0, 0, 0, 0, 1, 1]),
        ([5, 2, 1, 2, 4, 2], [0, 1, 0, 0, 0, 1]),  # the second round's way up is not tail
        ([2, 2, 1], [1, 1, 1]),
    ):
        assert EngineSteps(running=running).in_tail(2).astype(int).tolist() == tail
