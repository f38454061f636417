"""One recorded run, one recommendation."""

import json

import numpy as np
import pytest

from sam.simulate.rollout import Choice
from sam.tune import Trial, best, gains, main, override
from tests.sam.simulate.test_recorded import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return {"sam": write_run(folder / "sam", steps=5), "off": write_run(folder / "off", method="off", steps=5)}


def test_what_pays_is_recommended_with_its_interval_and_the_override(runs, capsys):
    arguments = [str(runs["sam"]), "--cost-from", str(runs["off"]), "--k", "2", "6", "--threshold", "2", "8", "64"]
    arguments += ["--chunk", "0", "16", "100000"]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert abs(result["simulated_error"]) < 0.03 and result["drafts_seen"] and result["plain_steps_from"] <= 4
    chosen = result["recommended"]
    low, high = chosen["interval"]
    assert chosen["pays"] and 1.0 < low < chosen["speedup"] < high
    # 12 requests run at most: the threshold of 64 is the first that is never exceeded.
    assert {row["policy"] for row in result["candidates"]} == {
        *(f"threshold {t}, k {k}" for t in (2, 8, 64) for k in (2, 6)), "goodput, k 6",
    }  # fmt: skip
    routers = {(row["router"], row["chunk"]) for row in result["candidates"]}
    assert routers == {("verl", 0), ("context", 0), ("context", 16)}, "no chunk is longer than the longest response"
    assert chosen["speedup"] >= result["candidates"][0]["speedup"] / 1.011
    assert chosen["override"].startswith("speculation=sam speculation.policy=")


def test_a_run_without_drafts_is_told_so(runs, capsys):
    assert main([str(runs["off"]), "--k", "3", "--threshold", "8", "--steps", "2"]) == 0
    out = capsys.readouterr().out
    assert "no draft was ever verified: what that costs is a guess" in out
    assert "fewer than five training steps" in out


def test_of_equally_fast_candidates_the_one_that_wastes_least():
    def trial(seconds, wasted, threshold, router="verl"):
        return Trial(Choice(threshold=threshold, router=router), np.array([seconds]), wasted, 2.0)

    trials = [trial(10.0, 900, 1), trial(10.05, 100, 2), trial(11.0, 0, 3)]
    assert best(trials).choice.threshold == 2
    assert best([*trials, trial(9.98, 0, 2, "context")]).choice.router == "verl", "it must be worth its while"
    assert best([*trials, trial(9.0, 0, 2, "context")]).choice.router == "context"


def test_intervals_widen_with_the_error():
    without, with_ = np.array([10.0, 12.0, 11.0]), np.array([5.0, 6.0, 5.5])
    assert gains(without, with_, 0.0) == pytest.approx((2.0, 2.0, 2.0))
    assert gains(without, with_, 0.1)[1:] == pytest.approx((2 * np.exp(-0.164), 2 * np.exp(0.164)), rel=0.02)


def test_overrides_are_keys_of_the_recipe():
    assert override(Choice("threshold", 4, 16)).endswith("num_speculative_tokens=4 speculation.batch_size_threshold=16")
    words = override(Choice("goodput", 8, router="context")).split()
    assert words[:2] == ["speculation=sam", "speculation.policy=goodput"]
    assert words[-2:] == ["routing=context", "routing.chunk_tokens=null"]


def test_mistakes_are_one_line(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: no config.yaml there; expected a run directory of recipe.main_dapo\n"
    )
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path), "--k", "0"])
