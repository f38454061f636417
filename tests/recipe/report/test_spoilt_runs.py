"""Run directories, many of them spoilt: what can be shown is, one line says what cannot, and no figure changes."""

import html
import json
import shutil
import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sam.simulate.run import RecordedRun, fit_runs
from sam_recipe.record import differences
from sam_recipe.report import page
from sam_recipe.report.runs import Run, load_runs
from tests.recipe.report.test_report import make_run
from tests.sam.record.spoilt import CUTS, EACH, PATHS, VALUES, one_line, spoil_bytes, spoil_value

FILES = (
    "metrics.jsonl", "config.yaml", "versions.json", "rollouts/1.jsonl", "engine_steps/2.npz",
)  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return make_run(folder / "sam", "sam", 3.0, [0.1, 0.2]), make_run(folder / "off", "off", 6.0, [0.1, 0.2])


@pytest.fixture(scope="module")
def baseline(pair):
    return Run.load(pair[1])


def words_of(directory, baseline) -> tuple[dict, str, str]:
    """The summary, its figures in words, and the remarks and tables."""
    runs = [*load_runs([directory]), baseline]
    summary = page.summarize(runs) | {"stock_note": ""}
    differences(runs[0].config, baseline.config)
    said = "\n".join([*page.answer(runs, summary, None), *map(str, page.facts(summary))])
    return summary, said, "\n".join(page.remarks(runs, summary))


def spoil(name: str, content: bytes, cuts, path, new) -> bytes:
    if name.endswith(".npz"):
        return spoil_bytes(content, cuts or [("cut", 77, b"")])
    if cuts:
        return spoil_bytes(content, cuts)
    rows = spoil_value([json.loads(line) for line in content.splitlines()], path, new)
    rows = rows if isinstance(rows, list) else [rows]
    return "\n".join(json.dumps(row) for row in rows).encode() + b"\n"


@settings(EACH, max_examples=2000)
@given(name=st.sampled_from(FILES), cuts=st.lists(CUTS, max_size=2), path=PATHS, new=VALUES)
def test_a_report_says_what_it_leaves_out(pair, baseline, name, cuts, path, new):
    (file := pair[0] / name).write_bytes(spoil(name, before := file.read_bytes(), cuts, path, new))
    try:
        with warnings.catch_warnings(), one_line(pair[0]):
            warnings.simplefilter("ignore", RuntimeWarning)
            summary, said, left_out = words_of(pair[0], baseline)
            assert "nan" not in said and "inf" not in said
            if name.startswith("rollouts"):
                assert summary["identical_by_step"]["2"] == [4, 4]
                assert "1" in summary["identical_by_step"] or f"{file}" in left_out
            elif name.startswith("engine_steps"):
                assert f"{file}" in left_out or len(Run.load(pair[0]).recorded) == 2
    finally:
        file.write_bytes(before)


@settings(EACH, max_examples=500)
@given(name=st.sampled_from(FILES[:2] + FILES[3:]), cuts=st.lists(CUTS, max_size=2), path=PATHS, new=VALUES)
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


def test_the_page_of_a_damaged_run_is_written(pair, tmp_path, capsys):
    first, second = (shutil.copytree(run, tmp_path / run.name) for run in pair)
    (first / "versions.json").write_text("")
    (first / "rollouts" / "2.jsonl").write_bytes((first / "rollouts" / "2.jsonl").read_bytes()[:-20])
    (first / "engine_steps" / "1.npz").write_bytes(b"PK")
    (first / "metrics.jsonl").write_text((first / "metrics.jsonl").read_text().replace("0.1", "NaN"))
    assert page.main([str(first), str(second), "--output", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "Identical responses: 4 of 4" in said and "nan" not in said
    for file in ("versions.json", "rollouts/2.jsonl, line 4", "engine_steps/1.npz"):
        assert f"{first / file}: not " in said
        assert f"{first / file}: not " in html.unescape((tmp_path / "out" / "report.html").read_text())
