"""Trained drafters in simulated rollouts: small enough to be played by hand, and what must hold of every one."""

import json

import numpy as np
import pytest

from sam.simulate.__main__ import main
from sam.simulate.engine import Cluster
from sam.simulate.lengths import LogNormal
from sam.simulate.rollout import Choice, simulate
from sam.simulate.trained.drafts import PASS_SHARE, TrainedDrafter, draw_accepted
from sam.switch.step_cost import linear
from tests.sam.simulate.test_engine import ALL, COST, accepting, work

FLAT = linear(10.0, 0.0, 0.0)  # 10 ms, whatever runs
NOTHING = accepting((3, 0))


def play(rounds, drafter="eagle3", policy="always", k=3, cost=FLAT, table=NOTHING, replicas=1, **described):
    rounds = rounds if isinstance(rounds, list) else [rounds]
    described.setdefault("pass_share", 0.0)
    trained = [TrainedDrafter(**described)] * len(rounds) if described.get("shares") else ()
    choice = Choice(policy, k, drafter=drafter)
    return simulate(rounds, Cluster(replicas), choice, cost, table, 1, trained=trained)[0]


def drawn(number=3):
    return [LogNormal(60, 300, 0.6, 0.4).draw(4, 4, 9, seed) for seed in range(number)]


def test_every_token_accepted_at_no_cost_gives_k_plus_one_tokens_a_step():
    # The prompt brings the first token, without drafts; then four tokens a step.
    found = play(work(9), shares=(1.0,))
    assert (found.seconds, found.accept_length, found.accepted) == (pytest.approx(0.03), 4.0, 6)
    assert play(work(9), shares=(1.0, 0.0)).accept_length == 2.0, "the second position is never accepted"


def test_passes_take_their_share_of_a_step():
    # Two steps with three passes of 0.1 x 10 ms each.
    assert play(work(9), shares=(1.0,), pass_share=0.1).seconds == pytest.approx(0.01 + 2 * 0.013)


def test_the_first_pass_reads_what_is_not_there():
    cost = linear(0.0, 0.0, 1.0)  # a millisecond for each token
    found = play(work(5, prompt_tokens=40), shares=(1.0,), pass_share=0.1, cost=cost)
    # One step without drafts; one with four tokens, a first pass over 41 and two over one.
    assert found.seconds == pytest.approx((1 + 4 + 4.1 + 0.1 + 0.1) / 1e3)


def test_nothing_accepted_is_left_off_by_goodput():
    off = play(work(200, 150), policy="never", cost=COST)
    found = play(work(200, 150), policy="goodput", cost=COST, shares=(0.0,), pass_share=PASS_SHARE)
    assert (found.seconds, found.drafted) == (pytest.approx(off.seconds), 0)
    assert play(work(200, 150), cost=COST, shares=(0.01,), pass_share=PASS_SHARE).seconds > off.seconds, "always loses"


def test_passes_that_cost_more_than_they_bring_are_left_off():
    cheap, dear = (
        play(work(200), policy="goodput", shares=(0.6,), pass_share=share) for share in (PASS_SHARE, 0.9)
    )  # fmt: skip
    assert cheap.drafted > 0 and dear.drafted == 0


def test_staleness_lowers_acceptance_and_speed():
    found = [play(drawn(), shares=(0.8, 0.7), decay=0.1, staleness=steps) for steps in (0, 3, 12)]
    lengths = [one.accept_length for one in found]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1] + 0.5
    assert found[0].seconds < found[1].seconds < found[2].seconds
    assert TrainedDrafter((0.8,), decay=0.1).older(2).expected(2) == pytest.approx([0.648, 0.648**2])


@pytest.mark.parametrize("share", [0.2, 0.6, 0.9])
@pytest.mark.parametrize("accepted", [1, 3])
def test_hybrid_is_no_slower_than_the_better_of_its_sources(share, accepted):
    table = accepting((3, accepted), (3, 0), (3, 0))
    described = {"shares": (share,), "pass_share": PASS_SHARE, "cost": COST, "policy": "goodput", "table": table}
    hybrid, eagle3, sam = (play(drawn(), name, **described).seconds for name in ("hybrid", "eagle3", "sam"))
    assert hybrid <= 1.03 * min(eagle3, sam)


def test_hybrid_takes_each_request_from_the_better_source():
    """Half of the steps have a sure draft of three copied tokens; in the others a trained one fills the gap."""
    table = accepting((3, 3), (0, 0))
    described = {"shares": (0.6,), "pass_share": 0.05, "policy": "goodput", "table": table, "cost": FLAT}
    hybrid, eagle3, sam = (play(drawn(), name, **described).seconds for name in ("hybrid", "eagle3", "sam"))
    assert hybrid < 0.97 * min(eagle3, sam)


def test_text_that_always_repeats_leaves_no_pass():
    free = {"shares": (0.5,), "policy": "goodput", "table": ALL}
    assert play(drawn(), "hybrid", pass_share=0.9, **free).seconds == play(drawn(), "sam", **free).seconds


def test_it_repeats_and_another_seed_accepts_other_tokens():
    described = {"shares": (0.7, 0.5), "policy": "goodput", "cost": COST, "replicas": 2}
    assert play(drawn(), "hybrid", **described) == play(drawn(), "hybrid", **described)
    requests, generated, cumulative = np.arange(20_000), np.full(20_000, 7), np.array([0.7, 0.35, 0.1])
    first, other = (draw_accepted(requests, generated, cumulative, seed) for seed in (1, 2))
    assert (first != other).any()
    assert [(first > i).mean() for i in range(3)] == pytest.approx(cumulative, abs=0.02)
    assert abs(np.corrcoef(first, other)[0, 1]) < 0.03


def test_rounds_of_later_training_steps_have_an_older_drafter():
    one = drawn(1)[0]
    trained = [TrainedDrafter((0.8,), decay=0.2).older(steps) for steps in (0, 8)]
    first, second = simulate(
        [one, one], Cluster(), Choice("always", 3, drafter="eagle3"), FLAT, NOTHING, 1, trained=trained
    )[1]
    assert first.seconds.max() < 0.7 * second.seconds.max()


def test_the_command_compares_drafters(capsys):
    arguments = "--log-normal 200 900 0.6 0.3 --prompts 4 --samples 4 --step-cost qwen3_32b --k 3 --policy goodput"
    described = "--drafter sam eagle3 hybrid --draft-acceptance 0.7 0.6 --pass-share 0.07 --router verl context"
    assert main([*arguments.split(), *described.split(), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["drafter"], row["router"]) for row in rows[1:]] == [
        (name, router) for name in ("sam", "eagle3", "hybrid") for router in ("verl", "context")
    ]  # fmt: skip
    by_name = {row["drafter"]: row["seconds"] for row in rows[1:] if row["router"] == "verl"}
    assert by_name["hybrid"] <= 1.03 * min(by_name.values()) and by_name["eagle3"] < rows[0]["seconds"]
    assert main([*arguments.split(), *described.split()]) == 0
    assert "eagle3" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, line",
    [
        ("--drafter eagle3", "name its acceptance by position with --draft-acceptance"),
        ("--drafter eagle3 --draft-acceptance 1.2", "--draft-acceptance [1.2]: expected shares from 0 to 1"),
        ("--drafter eagle3 --draft-acceptance 0.5 --pass-share -1", "--pass-share -1.0: expected 0 or more"),
        ("--drafter eagle3 --draft-acceptance 0.5 --decay 2", "--decay 2.0: expected a share from 0 to 1"),
    ],
)
def test_mistakes_are_one_line(options, line, capsys):
    base = "--log-normal 20 90 0.6 0.3 --prompts 1 --samples 2 --step-cost qwen3_32b --k 3"
    assert main([*base.split(), *options.split()]) == 2
    (said,) = [row for row in capsys.readouterr().err.splitlines() if row.startswith("error: ")]
    assert line in said


def test_hybrid_goes_with_sam_alone(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--setup", "qwen3_32b", "--drafter", "hybrid", "ngram"])
    assert "expected one that copies text, and sam beside hybrid" in capsys.readouterr().err
