"""Run directories, thousands of them spoilt: what can be shown is, one line says what cannot, and no figure changes."""

import json
import shutil
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe.report.__main__ import main
from recipe.report.answer import answer, remarks, ten_lines
from recipe.report.page import all_tables
from recipe.report.runs import Run, make_comparable, summarize
from recipe.report.tables import AGREEMENT_HEADER, agreement
from sam.record.engine_steps import EngineSteps
from sam.simulate.run import RecordedRun, fit_runs
from tests.recipe.report.test_report import make_run
from tests.sam.record.spoilt import CUTS, EACH, PATHS, VALUES, one_line, spoil_bytes, spoil_value

FILES = (
    "metrics.jsonl", "config.yaml", "versions.json", "peak_memory.json", "rollouts/1.jsonl", "engine_steps/2.npz",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("recipe.report.paired_test.RESAMPLES", 10)
        yield make_run(folder / "sam", "sam", 3.0, [0.1, 0.2]), make_run(folder / "off", "off", 6.0, [0.1, 0.2])


@pytest.fixture(scope="module")
def baseline(pair):
    return Run.load(pair[1])


def words_of(directory, baseline, is_figures=True) -> tuple[dict, str]:
    """The summary, and all that a report says in words; its tables only where figures may be others."""
    runs = [Run.load(directory, is_whole=False), baseline]
    make_comparable(runs)
    summary = summarize(runs)
    rows = agreement(*runs)
    named = {row[0]: dict(zip(AGREEMENT_HEADER[1:], row[1:], strict=True)) for row in rows}
    summary |= {"agreement": named, "stock": None, "stock_note": ""}
    tables = all_tables(runs, summary, None) if is_figures else ""
    return summary, "\n".join([*answer(summary), *ten_lines(summary), *remarks(runs, summary), str(tables)])


def spoil(name: str, content: bytes, cuts, path, new) -> bytes:
    if name.endswith(".npz"):
        return spoil_bytes(content, cuts or [("cut", 77, b"")])
    if cuts:
        return spoil_bytes(content, cuts)
    rows = spoil_value([json.loads(line) for line in content.splitlines()], path, new)
    rows = rows if isinstance(rows, list) else [rows]
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


@settings(EACH, max_examples=1500)
@given(name=st.sampled_from(FILES), cuts=st.lists(CUTS, max_size=2), path=PATHS, new=VALUES)
def test_a_report_says_what_it_leaves_out(pair, baseline, name, cuts, path, new):
    (file := pair[0] / name).write_bytes(spoil(name, before := file.read_bytes(), cuts, path, new))
    try:
        with warnings.catch_warnings(), one_line(pair[0]):
            warnings.simplefilter("ignore", RuntimeWarning)
            summary, words = words_of(pair[0], baseline, name in FILES[:2])
            figures = "\n".join([*answer(summary), *ten_lines(summary)])
            assert name == "versions.json" or not ("nan" in figures or "inf" in figures)
            if name.startswith("rollouts"):
                assert summary["identical_by_step"]["2"] == [4, 4]
                assert "1" in summary["identical_by_step"] or f"{file}" in words
            elif name.startswith("engine_steps"):
                assert summary["rollout_speedup_tail"] == pytest.approx(2.0) or f"{file}" in words
    finally:
        file.write_bytes(before)


@settings(EACH, max_examples=500)
@given(name=st.sampled_from(FILES[:2] + FILES[4:]), cuts=st.lists(CUTS, max_size=2), path=PATHS, new=VALUES)
def test_a_simulation_takes_a_run_whole_or_not_at_all(pair, name, cuts, path, new):
    (file := pair[0] / name).write_bytes(spoil(name, before := file.read_bytes(), cuts, path, new))
    try:
        with one_line(pair[0], "recorded engine steps"):
            run = RecordedRun.load(pair[0])
            rounds = [work for step in run.seconds for work, _ in run.rounds(step)]
            fit_runs([run])
            assert sum(len(work) for work in rounds) == 4 * len(run.seconds)
    finally:
        file.write_bytes(before)


def test_the_page_of_a_damaged_run_is_written(pair, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipe.report.__main__.replay_scopes", lambda run: {})  # compiles kernels
    first = shutil.copytree(pair[0], tmp_path / "first")
    (first / "versions.json").write_text("")
    (first / "rollouts" / "2.jsonl").write_bytes((first / "rollouts" / "2.jsonl").read_bytes()[:-20])
    (first / "engine_steps" / "1.npz").write_bytes(b"PK")
    (first / "metrics.jsonl").write_text((first / "metrics.jsonl").read_text().replace("0.1", "NaN"))
    assert main([str(first), str(pair[1]), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "identical responses       4 of 4" in said and "nan" not in said
    for file in ("versions.json", "rollouts/2.jsonl, line 4", "engine_steps/1.npz"):
        assert f"{first / file}: not " in said
    assert (tmp_path / "out" / "report.html").is_file()


def test_engine_steps_that_do_not_fit_are_left_out(pair, baseline):
    steps = EngineSteps.load(pair[0], 2)
    steps.position_steps = steps.position_emitted = np.ones(5, np.int64)
    before = EngineSteps.path(pair[0], 2).read_bytes()
    steps.save(pair[0], 2)
    try:
        summary, words = words_of(pair[0], baseline)
        assert (
            summary["rollout_speedup_tail"] is None
            and "position_steps: expected 2 values as in the first step" in words
        )
    finally:
        EngineSteps.path(pair[0], 2).write_bytes(before)
