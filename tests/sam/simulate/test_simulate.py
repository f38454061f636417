"""The command: every source of requests, what it prints, and what it says of mistakes."""

import json

import pytest

from sam.simulate.__main__ import main
from sam.switch.step_cost import linear
from tests.sam.simulate.test_recorded import write_run

LENGTHS = ("--log-normal", "300", "1500", "0.6", "0.4", "--prompts", "6", "--samples", "4")


@pytest.fixture
def cost(tmp_path):
    linear(10.0, 0.0, 0.05, source="a test").save(tmp_path / "cost.json")
    return ("--step-cost", str(tmp_path / "cost.json"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return [write_run(folder / "sam"), write_run(folder / "off", method="off")]


def result(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_sweep_of_drawn_lengths(cost, capsys):
    arguments = (*LENGTHS, *cost, "--replicas", "2", "--policy", "threshold", "always", "--k", "3", "4", "--threshold")
    report = result(capsys, *arguments, "2", "6", "--scope", "request", "group")
    assert report["requests"] == 24 and report["step_cost"] == "a test" and report["tail_threshold"] == 8
    labels = [(row["label"], row["scope"]) for row in report["rows"]]
    assert labels[0] == ("off", "request") and len(set(labels)) == len(labels) == 1 + 2 * 2 * 2 + 2 * 2
    rows = {(row["label"], row["scope"]): row for row in report["rows"]}
    assert rows["off", "request"]["speedup"] == 1.0
    assert rows["threshold 2, k 3", "group"]["speedup"] < rows["threshold 6, k 3", "group"]["speedup"]
    assert rows["always, k 3", "request"]["accept_length"] < rows["always, k 3", "group"]["accept_length"]
    assert all(row["tokens"] == report["tokens"] and row["wasted"] == row["drafted"] - row["accepted"]
               for row in report["rows"])  # fmt: skip


def test_the_table(cost, capsys):
    assert main([*LENGTHS, *cost, "--policy", "threshold", "--threshold", "3"]) == 0
    head, costs, names, off, on = capsys.readouterr().out.splitlines()
    assert head.startswith("24 requests, ") and head.endswith("tail from 3 running requests")
    assert costs == "step costs: a test" and names.split()[-4:] == ["length", "wasted", "preempted", "moves"]
    assert off.split()[0] == "off" and on.startswith("threshold 3, k 3")


def test_a_published_setup_can_be_changed(capsys):
    arguments = ("--setup", "qwen3_32b", "--prompts", 4, "--replicas", 2, "--policy", "threshold", "--threshold", 4)
    report = result(capsys, *arguments, "--routing", "least-loaded", "shared")
    assert (report["replicas"], report["requests"], report["tail_threshold"]) == (2, 64, 4)
    assert [row["routing"] for row in report["rows"]] == ["least-loaded", "least-loaded", "shared"]
    assert report["step_cost"] == "FITTED TO PUBLISHED FIGURES, NOT MEASURED"


def test_recordings_are_drafted_on_or_drawn_from(cost, runs, capsys):
    dump = runs[0] / "rollouts" / "1.jsonl"
    arguments = ("--traces", dump, *cost, "--policy", "always", "--k", "3")
    real = result(capsys, *arguments)["rows"][1]
    drawn = result(capsys, *arguments, "--acceptance", dump)["rows"][1]
    assert real["tokens"] == drawn["tokens"] and 1.3 < drawn["accept_length"] < 4.0
    assert drawn["accept_length"] == pytest.approx(real["accept_length"], rel=0.15)
    peer = result(capsys, *arguments, "--drafter", "first-occurrence")["rows"][1]
    assert peer["scope"] == "request" and peer["accepted"] < real["accepted"]


def test_recorded_runs_are_simulated_as_they_ran(runs, capsys):
    report = result(capsys, "--run", *runs, "--policy", "goodput")
    for row, method in zip(report["runs"], ("sam", "off"), strict=True):
        assert row["method"] == method and abs(row["error"]) < 0.03
        assert row["engine_steps"] == pytest.approx(row["measured_engine_steps"], rel=0.02)
        assert row["accepted"] == pytest.approx(row["measured_accepted"], rel=0.05)
    assert report["rows"][1]["label"] == "goodput, k 3" and report["rows"][1]["speedup"] > 1.0
    assert main(["--run", str(runs[0]), "--cost-from", *map(str, runs)]) == 0
    assert "threshold 4, k 3" in capsys.readouterr().out


def test_mistakes_are_one_line(cost, capsys, tmp_path):
    def error(*arguments):
        assert main(list(map(str, arguments))) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        return message

    assert "--step-cost is missing: a file, or one of qwen3_235b" in error(*LENGTHS)
    assert "expected at least 1 and less than the cap" in error("--log-normal", 9, 5, 1, 0, *cost)
    assert "none.npz: no such file" in error("--traces", tmp_path / "none.npz", *cost)
    assert "a folder; expected files" in error("--traces", tmp_path, *cost)
    assert "no config.yaml there; expected a run directory" in error("--run", tmp_path)
    assert "name a recording to draft on with --acceptance" in error(*LENGTHS, *cost, "--k", 13)
    assert "replicas=0: expected at least 1" in error(*LENGTHS, *cost, "--replicas", 0)
    for arguments in (["--setup", "qwen4"], [*LENGTHS, "--seeds", "0"], []):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
