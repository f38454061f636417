"""Rollouts small enough to be played by hand, and what must hold of every one."""

import numpy as np
import pytest

from sam.record.responses import Recording
from sam.switch.step_cost import StepCost, linear
from sam.tools.simulate.rollout import SETUPS, Choice, Cluster, drawn, load_setup, real, simulate, summarize
from sam.tools.simulate.workload import Acceptance, Round, log_normal, recorded_round

COST = linear(10.0, 0.0, 1.0)  # 10 ms and one for each token


def work(*lengths, arrivals=None):
    count = len(lengths)
    arrivals = np.zeros(count) if arrivals is None else np.array(arrivals)
    return Round(np.array(lengths), np.arange(count), np.full(count, 4), arrivals)


def accepting(*records, k=3):
    """A table of one level whose cells are alike: (draft tokens, accepted) of its verify steps."""
    drafted, accepted = np.array(records).T
    acceptance = (np.arange(k) < drafted[:, None]) * (accepted / np.maximum(1, drafted))[:, None]
    cells = [np.broadcast_to(one, (1, 7, *one.shape)) for one in (acceptance.astype(np.float32), drafted, accepted)]
    return drawn(lambda k: Acceptance(np.array([1]), *cells))


def play(rounds, policy="never", threshold=8, drafts=None, cost=COST, cluster=None, **choice):
    rounds = rounds if isinstance(rounds, list) else [rounds]
    drafts = drafts or accepting((3, 3))
    played = simulate(rounds, Cluster(**cluster or {}), Choice(policy, 3, threshold, **choice), cost, drafts)
    return summarize(played), played


def test_requests_without_speculation():
    outcome, _ = play([work(3, 5), work(2)])
    assert outcome["seconds"] == pytest.approx((3 * 12 + 2 * 11 + 2 * 11) / 1e3)
    assert (outcome["tokens"], outcome["engine_steps"], outcome["drafted"], outcome["switched_on"]) == (10, 7, 0, 0.0)
    assert play(work(3, 5), cluster={"max_num_seqs": 1})[0]["seconds"] == pytest.approx(8 * 11 / 1e3)
    assert play(work(2, 2), cluster={"admit_ms": 3.0})[0]["seconds"] == pytest.approx((12 + 6 + 12) / 1e3)
    # The engine is idle from 22 to 40 ms; the long request has taken steps of 11 ms when the other comes.
    assert play(work(2, 2, arrivals=[0.0, 40.0]))[0]["seconds"] == pytest.approx((40 + 22) / 1e3)
    (timeline,) = play(work(90, 2, arrivals=[0.0, 40.0]))[1][0]
    assert timeline["end_ms"][timeline["running"] == 2].tolist() == pytest.approx([56, 68])
    # Replicas run on their own, or wait for the slowest.
    for waits, engine_steps in ((False, 10), (True, 6)):
        outcome, _ = play(work(2, 2, 6), cluster={"replicas": 3, "dp_synchronous": waits})
        assert outcome["seconds"] == pytest.approx(66 / 1e3) and outcome["engine_steps"] == engine_steps


def test_the_threshold_switches_on_with_the_step_after_the_first_response():
    outcome, played = play(work(3, 8), "threshold", threshold=1)
    on = played[0][0]["switched_on"]
    assert played[0][0]["steps"][~on].sum() == 3 and played[0][0]["running"][on].tolist() == [1, 1]
    # Of 5 tokens left the first step brings 4, the second one: its draft's other tokens are wasted.
    assert (outcome["drafted"], outcome["accepted"], outcome["wasted"]) == (6, 4, 2)
    assert outcome["seconds"] == pytest.approx((3 * 12 + 14 + 14) / 1e3) and outcome["switched_on"] == 2 / 5
    assert play(work(4), "always", drafts=accepting((2, 0)))[0]["seconds"] == pytest.approx((11 + 3 * 13) / 1e3)


def test_jumps_are_the_sum_of_their_steps():
    cells = 10 + np.array([1, 64])[:, None, None] * (0.1 * np.array([1, 4])[:, None] + np.array([0.0, 2.0, 3.0]))
    cost = StepCost(np.array([1, 64]), np.array([1, 4]), np.array([1, 400, 4000]), cells)
    rounds = log_normal(600, 3000, 0.8, 0.5, (6, 4))
    outcome, _ = play(rounds, cost=cost, cluster={"max_num_seqs": 5})
    done, queue, running, total = np.zeros(24, int), list(range(24)), [], 0.0
    while queue or running:
        while queue and len(running) < 5:
            running.append(queue.pop(0))
        total += float(cost.step_ms(len(running), len(running), 128 + done[running].mean())[0])
        done[running] += 1
        running = [i for i in running if done[i] < rounds.lengths[i]]
    assert outcome["seconds"] == pytest.approx(total / 1e3, rel=2e-3) and outcome["tokens"] == rounds.num_tokens


@pytest.mark.parametrize("policy", ["never", "threshold", "goodput", "always"])
@pytest.mark.parametrize("dp_synchronous", [False, True])
def test_every_token_comes_once_and_twice_the_same(policy, dp_synchronous):
    rounds = log_normal(100, 400, 0.7, 0.4, (8, 4))
    cluster = {"replicas": 3, "dp_synchronous": dp_synchronous, "max_num_seqs": 6}
    (outcome, played), (again, _) = (
        play(rounds, policy, drafts=accepting((3, 3), (3, 1), (2, 0), (0, 0), (3, 2)), cluster=cluster)
        for _ in range(2)
    )
    assert outcome == again and outcome["tokens"] == rounds.num_tokens
    assert max(timeline["running"].max() for timeline in played[0]) == 6
    assert (outcome["switched_on"] > 0) == (policy != "never")


def test_more_siblings_are_accepted_more_often():
    """Samples that say much the same in another order each, and each thing once."""
    chance = np.random.default_rng(0)
    phrases = [chance.integers(0, 5000, 30) for _ in range(20)]
    samples = [np.concatenate([phrases[i] for i in chance.permutation(20)]).astype(np.int32) for _ in range(8)]
    recording, found = Recording([np.array([1, 2, 3], np.int32)], [samples]), {}
    for scope in ("request", "group", "shared"):
        settings = {"drafts": real(), "cost": linear(10.0, 0.0, 0.1), "cluster": {"replicas": 4}, "scope": scope}
        outcome, _ = play(recorded_round(recording), "always", **settings)
        assert outcome["tokens"] == recording.num_tokens
        found[scope] = outcome["accept_length"]
    assert found["request"] < 1.1 < found["group"] < 0.9 * found["shared"]


def test_published_setups_say_what_their_step_costs_are():
    for name in SETUPS:
        setup = load_setup(name, prompts=2)
        assert setup.cost.source.startswith("FITTED TO PUBLISHED FIGURES") and len(setup.work) == 32
        if name.endswith("_cautious"):
            assert setup.cost.step_ms(8, 32, 100) == setup.cost.step_ms(8, 32, 20480)
