"""Engine steps on disk and between processes; files replaced whole."""

import numpy as np
import pytest

from sam.record import replacing
from sam.record.engine_steps import PER_STEP, EngineSteps


def test_what_is_saved_is_loaded(tmp_path):
    columns = {name: np.arange(5).astype(dtype) for name, dtype in PER_STEP.items()}
    histograms = {"drafted_at": [3, 1], "accepted_at": [2, 0], "turn_steps": [2, 1, 0, 0], "turn_emitted": [4, 2, 0, 0]}
    steps = EngineSteps(**columns, **histograms, preemptions=3, counters={"draft_errors": 2})
    (tmp_path / "engine_steps").mkdir()
    steps.save(tmp_path, 3)
    assert [file.name for file in tmp_path.rglob("*.*")] == ["3.npz"]
    loaded = EngineSteps.load(tmp_path, 3)
    for name in (*columns, *histograms):
        kept, found = getattr(steps, name), getattr(loaded, name)
        assert kept.dtype == found.dtype and kept.tolist() == found.tolist(), name
    assert (loaded.preemptions, loaded.counters) == (3, {"draft_errors": 2})


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
