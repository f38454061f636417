"""`sam tune`: one recorded run, one recommendation; and set-ups of which there is no run."""

import re
from dataclasses import replace

import numpy as np
import pytest

from sam.tools.simulate.rollout import Choice
from sam.tools.simulate.run import FittedCost, RecordedRun
from sam.tools.tune import Measured, Trial, chosen_of, doubts, main
from tests.sam.tools.simulate.test_recorded import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"sam": write_run(folder / "sam", steps=5), "off": write_run(folder / "off", method="off", steps=5)}


def printed(capsys, *arguments):
    assert main([*map(str, arguments)]) == 0
    return capsys.readouterr().out.splitlines()


def test_what_pays_is_recommended_with_its_interval_and_the_override(runs, capsys):
    *candidates, costs, itself, over, expected, last = printed(
        capsys, runs["sam"], "--k", "2", "6", "--threshold", "2", "8", "64"
    )
    # 12 requests run at most: the threshold of 64 is the first that is never exceeded.
    labels = {line.partition("  ")[0] for line in candidates}
    own = "threshold 4, k 3"
    assert labels == {*(f"threshold {t}, k {k}" for t in (2, 8, 64) for k in (2, 6)), "goodput, k 6", own}
    assert [line.partition("  ")[0] for line in candidates if line.endswith("the run's own")] == [own]
    assert costs.startswith("step costs: fitted to ") and itself.endswith("5 training steps")
    assert abs(float(re.search(r"\(([+-].*)%\)", itself)[1])) < 3
    assert over.startswith(f"over {runs['off']}, without speculation: "), "the run beside it"
    measured, simulated = map(float, re.findall(r"(\d+\.\d+)x", over))
    assert measured == pytest.approx(simulated, rel=0.03)
    gain, low, high = map(float, re.findall(r"\d+\.\d+", expected))
    assert 1.0 < low < gain < high and last.startswith("speculation=sam speculation.policy=")
    assert gain == pytest.approx(float(re.search(r"speed-up (\S+),", candidates[0])[1]), rel=0.01)
    lines = printed(capsys, runs["off"], "--k", "3", "--threshold", "8", "--steps", "2")
    assert any(line.startswith("no draft was ever verified: what that costs is a guess") for line in lines)
    assert "fewer than five training steps: the interval is too narrow to be trusted" in lines


def test_what_was_measured_beside_a_run_is_what_its_own_setting_gains():
    """Of a machine that was slower in one of the runs; others are scaled alike, and less certain."""
    without, own, other = (Trial(Choice(k=k), np.full(8, seconds), 0, 1.0) for k, seconds in enumerate((4.0, 2.0, 1.5)))
    measured = Measured(np.full(8, 1.0), np.full(8, 3.0))
    assert measured.gain_of(without, own, own) == (3.0, 3.0, 3.0)
    gain, low, high = measured.gain_of(without, own, other)
    assert gain == pytest.approx(4.0) and low < 3.0 < 5.0 < high
    gain, low, high = Measured(np.full(8, 1.0), None).gain_of(without, own, own)
    assert gain == 2.0 and low < 1.5 < 2.5 < high
    # A machine that was half as slow for the whole run is no error of the simulation.
    assert Measured(np.full(8, 1.0), None, np.full(8, 0.5)).gain_of(without, own, own) == (2.0, 2.0, 2.0)
    assert chosen_of([own, other]) is other
    assert chosen_of([own, other._replace(seconds=np.full(8, 1.98))]) is own


def test_a_run_of_other_circumstances_is_no_reference(runs, tmp_path):
    run = RecordedRun.load(runs["sam"])
    beside = run.reference_beside()
    assert beside.directory == runs["off"].resolve() and beside.reference_beside() is None
    assert not replace(beside, config=beside.config | {"seed": 1}).is_reference_of(run)
    alone = replace(run, directory=tmp_path / "alone")
    (tmp_path / "alone").mkdir()
    (said,) = [line for line in doubts(alone, None, FittedCost(None, 0.0, True, 1)) if "no run without" in line]
    assert f"beside it in {tmp_path}: " in said


def test_a_published_setup(capsys, monkeypatch):
    monkeypatch.setattr("sam.tools.simulate.rollout.CAP", 500)
    arguments = ["--setup", "qwen3_32b", "--prompts", "1", "--policy", "always", "--scope", "request", "shared"]
    head, costs, header, *table = printed(capsys, *arguments)
    assert re.fullmatch(r"16 requests, \d+ tokens, 4 replicas", head) and "FITTED" in costs
    assert header.split() == ["policy", "scope", "seconds", "speed-up", "drafting", "length", "wasted"]
    rows = {tuple(re.split(r"  +", line.strip())[:2]): [*map(float, line.split()[-5:])] for line in table}
    assert rows.keys() == {("off", "request"), ("always, k 3", "request"), ("always, k 3", "shared")}
    speedups, lengths = ([row[column] for row in rows.values()] for column in (1, 3))
    assert speedups[0] == 1.0 < speedups[1] < speedups[2] and lengths[1] < lengths[2]


def test_mistakes_are_one_line(capsys, tmp_path):
    for words, said in (
        ([tmp_path], f"{tmp_path}: no config.yaml there; expected a run directory of sam run"),
        (["--setup", "qwen3_32b", "--prompts", "1", "--k", "13"], "--k 13: expected one of 3, 4, 8"),
    ):
        assert main([*map(str, words)]) == 2
        message = capsys.readouterr().err
        assert message.startswith(f"error: {said}") and message.count("\n") == 1
