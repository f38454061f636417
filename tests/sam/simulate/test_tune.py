"""`sam tune`: one recorded run, one recommendation; and set-ups of which there is no run."""

import json

import numpy as np
import pytest

from sam.simulate.rollout import Choice
from sam.switch.step_cost import linear
from sam.tune import Trial, best, main, override
from tests.sam.simulate.test_recorded import write_run

LENGTHS = ("--log-normal", "300", "1500", "0.6", "0.4", "--prompts", "6", "--samples", "4")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"sam": write_run(folder / "sam", steps=5), "off": write_run(folder / "off", method="off", steps=5)}


@pytest.fixture
def cost(tmp_path):
    linear(10.0, 0.0, 0.05, source="a test").save(tmp_path / "cost.json")
    return ("--step-cost", str(tmp_path / "cost.json"))


def result(capsys, *arguments):
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_what_pays_is_recommended_with_its_interval_and_the_override(runs, capsys):
    arguments = [runs["sam"], "--cost-from", runs["off"], "--k", "2", "6", "--threshold", "2", "8", "64"]
    found = result(capsys, *arguments, "--chunk", "0", "16", "100000")
    assert abs(found["simulated_error"]) < 0.03 and found["drafts_seen"] and found["plain_steps_from"] <= 4
    chosen = found["recommended"]
    low, high = chosen["interval"]
    assert chosen["pays"] and 1.0 < low < chosen["speedup"] < high
    # 12 requests run at most: the threshold of 64 is the first that is never exceeded.
    assert {row["policy"] for row in found["candidates"]} == {
        *(f"threshold {t}, k {k}" for t in (2, 8, 64) for k in (2, 6)), "goodput, k 6",
    }  # fmt: skip
    routers = {(row["router"], row["chunk"]) for row in found["candidates"]}
    assert routers == {("verl", 0), ("context", 0), ("context", 16)}, "no chunk is longer than the longest response"
    assert chosen["speedup"] >= found["candidates"][0]["speedup"] / 1.011
    assert chosen["override"].startswith("speculation=sam speculation.policy=")
    assert main([str(runs["off"]), "--k", "3", "--threshold", "8", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "no draft was ever verified: what that costs is a guess" in out and "fewer than five training steps" in out


def test_of_equally_fast_candidates_the_one_that_wastes_least():
    def trial(seconds, wasted, threshold, router="verl"):
        return Trial(Choice(threshold=threshold, router=router), np.array([seconds]), wasted, 2.0)

    trials = [trial(10.0, 900, 1), trial(10.05, 100, 2), trial(11.0, 0, 3)]
    assert best(trials).choice.threshold == 2
    assert best([*trials, trial(9.98, 0, 2, "context")]).choice.router == "verl", "it must be worth its while"
    assert best([*trials, trial(9.0, 0, 2, "context")]).choice.router == "context"
    words = override(Choice("goodput", 8, router="context")).split()
    assert words[:2] == ["speculation=sam", "speculation.policy=goodput"]
    assert words[-2:] == ["routing=context", "routing.chunk_tokens=null"]


def test_a_sweep_of_drawn_lengths(cost, capsys):
    arguments = (*LENGTHS, *cost, "--replicas", "2", "--policy", "threshold", "always", "--k", "3", "4", "--threshold")
    report = result(capsys, *arguments, "2", "6", "--scope", "request", "group")
    assert report["requests"] == 24 and report["step_cost"] == "a test"
    rows = {(row["label"], row["scope"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 1 + 2 * 2 * 2 + 2 * 2 and rows["off", "request"]["speedup"] == 1.0
    assert rows["threshold 2, k 3", "group"]["speedup"] < rows["threshold 6, k 3", "group"]["speedup"]
    assert rows["always, k 3", "request"]["accept_length"] < rows["always, k 3", "group"]["accept_length"]
    assert all(row["tokens"] == report["tokens"] for row in report["rows"])


def test_a_published_setup_can_be_changed(capsys):
    arguments = ("--setup", "qwen3_32b", "--prompts", 4, "--replicas", 2, "--policy", "threshold", "--threshold", 4)
    arguments += ("--scope", "group", "shared", "--router", "context", "--delay", 64)
    assert main([*map(str, arguments)]) == 0
    head, costs, _, off, *on = capsys.readouterr().out.splitlines()
    assert head.startswith("64 requests, ") and head.endswith("tokens, 2 replicas")
    assert costs == "step costs: FITTED TO PUBLISHED FIGURES, NOT MEASURED" and off.startswith("off ")
    wanted = [["4,", "k", "3", "group", "context", "0", "0"], ["4,", "k", "3", "shared", "context", "0", "64"]]
    assert [line.split()[1:8] for line in on] == wanted


def test_mistakes_are_one_line(cost, capsys, tmp_path):
    def error(*arguments):
        try:
            assert main([*map(str, arguments)]) == 2
        except SystemExit as ended:
            assert ended.code == 2
        message = capsys.readouterr().err
        assert message.startswith("error: ") and message.count("\n") == 1
        return message

    assert f"{tmp_path}: no config.yaml there; expected a run directory of sam_recipe.main_dapo" in error(tmp_path)
    assert "--k and --steps: expected 1 or more" in error(tmp_path, "--k", "0")
    assert "--step-cost is missing: a file, or one of qwen3_32b" in error(*LENGTHS)
    assert "'nowhere': neither a file nor one of qwen3_235b" in error(*LENGTHS, "--step-cost", "nowhere")
    assert "name a recording to draft on with --acceptance" in error(*LENGTHS, *cost, "--k", 13)
    assert "none.npz: no such file" in error(*LENGTHS, *cost, "--acceptance", tmp_path / "none.npz")
    assert "replicas=0: expected at least 1" in error(*LENGTHS, *cost, "--replicas", 0)
    assert "expected at least 1 and less than the cap" in error(*cost, "--log-normal", 9, 5, 1, 0)
    assert "invalid choice: 'qwen4'" in error("--setup", "qwen4")
    assert "--samples 0: expected 1 or more" in error(*LENGTHS, "--samples", "0")
