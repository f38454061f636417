"""The command: what it prints, and what it says of mistakes."""

import json

import pytest

from sam.switch.step_cost import linear
from sam.tune import main

LENGTHS = ("--log-normal", "300", "1500", "0.6", "0.4", "--prompts", "6", "--samples", "4")


@pytest.fixture
def cost(tmp_path):
    linear(10.0, 0.0, 0.05, source="a test").save(tmp_path / "cost.json")
    return ("--step-cost", str(tmp_path / "cost.json"))


def result(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_sweep_of_drawn_lengths(cost, capsys):
    arguments = (*LENGTHS, *cost, "--replicas", "2", "--policy", "threshold", "always", "--k", "3", "4", "--threshold")
    report = result(capsys, *arguments, "2", "6", "--scope", "request", "group")
    assert report["requests"] == 24 and report["step_cost"] == "a test"
    rows = {(row["label"], row["scope"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 1 + 2 * 2 * 2 + 2 * 2 and rows["off", "request"]["speedup"] == 1.0
    assert rows["threshold 2, k 3", "group"]["speedup"] < rows["threshold 6, k 3", "group"]["speedup"]
    assert rows["always, k 3", "request"]["accept_length"] < rows["always, k 3", "group"]["accept_length"]
    assert all(row["tokens"] == report["tokens"] for row in report["rows"])
    assert main([*LENGTHS, *cost, "--policy", "threshold", "--threshold", "3"]) == 0
    head, costs, _, off, on = capsys.readouterr().out.splitlines()
    assert head.endswith("tokens, 1 replicas") and costs == "step costs: a test"
    assert off.startswith("off ") and on.startswith("threshold 3, k 3")


def test_a_published_setup_can_be_changed(capsys):
    arguments = ("--setup", "qwen3_32b", "--prompts", 4, "--replicas", 2, "--policy", "threshold", "--threshold", 4)
    report = result(capsys, *arguments, "--scope", "group", "shared", "--router", "context", "--delay", 64)
    assert (report["replicas"], report["requests"]) == (2, 64)
    rows = [(row["scope"], row["router"], row["delay"]) for row in report["rows"]]
    assert rows == [("request", "verl", 0), ("group", "context", 0), ("shared", "context", 64)]
    assert report["step_cost"] == "FITTED TO PUBLISHED FIGURES, NOT MEASURED"


def test_mistakes_are_one_line(cost, capsys, tmp_path):
    def error(*arguments):
        assert main([*LENGTHS, *map(str, arguments)]) == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        return message

    assert "--step-cost is missing: a file, or one of qwen3_32b" in error()
    assert "'nowhere': neither a file nor one of qwen3_235b" in error("--step-cost", "nowhere")
    assert "name a recording to draft on with --acceptance" in error(*cost, "--k", 13)
    assert "none.npz: no such file" in error(*cost, "--acceptance", tmp_path / "none.npz")
    assert "replicas=0: expected at least 1" in error(*cost, "--replicas", 0)
    assert "expected at least 1 and less than the cap" in error(*cost, "--log-normal", 9, 5, 1, 0)
    for arguments in (["--setup", "qwen4"], [*LENGTHS, "--samples", "0"], []):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
