"""metrics.jsonl of a run that was interrupted, or whose disk was full."""

import numpy as np

from recipe.record import RunRecord, read_json, read_metrics


def test_a_line_written_by_halves_is_passed_over_and_gone_after_a_resume(tmp_path):
    record = RunRecord(tmp_path)
    for step in (1, 2):
        record.append_metrics(step, {"a": np.float32(step), "flag": True, "text": "x"})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 3, "a')
    assert read_metrics(tmp_path) == {1: {"a": 1.0}, 2: {"a": 2.0}} and read_metrics(tmp_path / "none") == {}
    record.start(first_step=2)
    record.append_metrics(2, {"a": 5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "a": 1.0}\n{"step": 2, "a": 5.0}\n'


def test_what_is_missing_or_damaged_holds_nothing(tmp_path):
    (tmp_path / "half.json").write_text('{"pid": 1')
    (tmp_path / "list.json").write_text("[1]")
    assert [read_json(tmp_path / name) for name in ("none.json", "half.json", "list.json")] == [{}, {}, {}]
