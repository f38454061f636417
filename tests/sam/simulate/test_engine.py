"""Rollouts small enough to be played by hand, and what must hold of every one."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.simulate.acceptance import CELL, Acceptance
from sam.simulate.engine import Cluster, max_num_tokens_other_ranks
from sam.simulate.lengths import LogNormal, Round
from sam.simulate.rollout import Choice, Drawn, simulate, tail_seconds
from sam.simulate.setups import load_step_cost
from sam.switch.policies import Threshold
from sam.switch.step_cost import StepCost, linear

COST = linear(10.0, 0.0, 1.0)  # 10 ms and one for each token


def work(*lengths, prompts=None, arrivals=None, prompt_tokens=4):
    count = len(lengths)
    return Round(
        np.array(lengths),
        np.arange(count) if prompts is None else np.array(prompts),
        np.full(count, prompt_tokens),
        np.zeros(count) if arrivals is None else np.array(arrivals, float),
    )


def accepting(*records, k=3):
    """A table of one cell: (draft tokens, accepted) of its verify steps."""
    acceptance = np.zeros((len(records), k), np.float32)
    for i, (drafted, accepted) in enumerate(records):
        acceptance[i, :drafted] = accepted / drafted if drafted else 0.0
    drafted, accepted = (np.array(column) for column in zip(*records, strict=True))
    cells = np.array([[(0, len(records))] * 7], CELL)
    return Drawn(lambda k: Acceptance(np.array([1]), cells, acceptance, drafted, accepted))


ALL = accepting((3, 3))


def play(rounds, policy="never", k=3, threshold=8, table=ALL, cost=COST, tail=1, routing="least-loaded", **cluster):
    choice = Choice(policy, k, threshold, routing=routing)
    rounds = rounds if isinstance(rounds, list) else [rounds]
    return simulate(rounds, Cluster(**cluster), choice, cost, table, tail)


def test_two_requests_without_speculation():
    outcome, played = play(work(3, 5))
    assert outcome.seconds == pytest.approx((3 * 12 + 2 * 11) / 1e3)
    assert (outcome.tokens, outcome.engine_steps, outcome.drafted, outcome.switched_on) == (8, 5, 0, 0.0)
    assert outcome.tail_seconds == pytest.approx(2 * 11 / 1e3)
    (timeline,) = played[0].timelines
    assert timeline["running"][-1] == 1 and timeline["end_ms"][-1] == pytest.approx(58)


def test_one_waits_for_the_other():
    outcome, played = play(work(3, 5), max_num_seqs=1)
    assert outcome.seconds == pytest.approx(8 * 11 / 1e3)
    assert set(played[0].timelines[0]["running"].tolist()) == {1}


def test_rounds_follow_each_other():
    assert play([work(3), work(5)])[0].seconds == pytest.approx(8 * 11 / 1e3)


def test_every_draft_accepted():
    # The prompt brings the first token, without drafts; then four tokens a step.
    outcome, played = play(work(9), "always")
    assert outcome.seconds == pytest.approx((11 + 14 + 14) / 1e3)
    assert (outcome.drafted, outcome.accepted, outcome.wasted, outcome.accept_length) == (6, 6, 0, 4.0)
    assert played[0].timelines[0]["switched_on"].tolist() == [False, True, True]


def test_the_threshold_switches_on_with_the_step_after_the_first_response():
    outcome, played = play(work(3, 8), "threshold", threshold=1)
    (timeline,) = played[0].timelines
    on = timeline["switched_on"]
    assert timeline["steps"][~on].sum() == 3 and timeline["running"][on].tolist() == [1, 1]
    # Of 5 tokens left the first step brings 4, the second one: its draft's other tokens are wasted.
    assert (outcome.drafted, outcome.accepted, outcome.wasted) == (6, 4, 2)
    assert outcome.seconds == pytest.approx((3 * 12 + 14 + 14) / 1e3)
    assert outcome.switched_on == pytest.approx(2 / 5)


def test_nothing_accepted_wastes_every_draft():
    outcome, _ = play(work(4), "always", table=accepting((2, 0)))
    assert (outcome.drafted, outcome.wasted, outcome.engine_steps) == (6, 6, 4)
    assert outcome.seconds == pytest.approx((11 + 3 * 13) / 1e3)


def test_requests_come_when_they_arrive():
    # The engine is idle from 22 to 40 ms.
    outcome, played = play(work(2, 2, arrivals=[0.0, 40.0]))
    assert outcome.seconds == pytest.approx((40 + 22) / 1e3)
    assert outcome.engine_steps == 4


def test_new_requests_cost_what_reading_their_prompts_costs():
    assert play(work(2, 2), admit_ms=3.0)[0].seconds == pytest.approx((12 + 6 + 12) / 1e3)


def test_replicas_run_on_their_own_or_wait_for_the_slowest():
    rounds = work(2, 2, 6, prompts=[0, 1, 2])
    alone, _ = play(rounds, replicas=3)
    together, _ = play(rounds, replicas=3, dp_synchronous=True)
    assert alone.seconds == pytest.approx(66 / 1e3) and alone.mean_seconds == pytest.approx((22 + 22 + 66) / 3e3)
    assert together.seconds == together.mean_seconds == pytest.approx(66 / 1e3)
    assert (alone.engine_steps, together.engine_steps) == (10, 6)


def test_a_synchronous_step_costs_what_the_fullest_replica_does():
    rounds = work(4, 4, 4, prompts=[0, 0, 1])
    outcome, _ = play(rounds, "threshold", threshold=1, replicas=2, dp_synchronous=True, routing="prompt")
    # Two requests here, one there: the one drafts 3 tokens, and its 4 rows are the most.
    assert outcome.seconds == pytest.approx((12 + 14 + 12 + 12) / 1e3)


def test_ranks_are_told_the_most_rows_of_another_ones_last_step(monkeypatch):
    replicas = [SimpleNamespace(num_tokens=count) for count in (3, 9, 5)]
    assert max_num_tokens_other_ranks(replicas) == [9, 5, 9]
    assert max_num_tokens_other_ranks(replicas[:1]) == [0]
    assert max_num_tokens_other_ranks([replicas[1], replicas[1]]) == [9, 9]
    planned, seen = [], []
    monkeypatch.setattr(Threshold, "observe", lambda _, state, *rest: seen.append(state.max_num_tokens_other_dp_ranks))
    plan = Threshold.plan
    monkeypatch.setattr(
        Threshold, "plan", lambda s, state: (planned.append(state.max_num_tokens_other_dp_ranks), plan(s, state))[1]
    )
    play(work(9, 9, 9, prompts=[0, 0, 1]), "threshold", threshold=1, replicas=2, dp_synchronous=True, routing="prompt")
    # Nothing is known at first. Then one request there and two here; the one has drafts from the second step on.
    assert planned[:6] == [0, 0, 2, 1, 2, 4]
    assert seen[:4] == [2, 4, 2, 4], "the first step reads prompts and is not shown"


def test_without_speculation_it_is_the_sum_of_the_steps():
    cells = 10 + np.array([1, 64])[:, None, None] * (0.1 * np.array([1, 4])[:, None] + np.array([0.0, 2.0, 3.0]))
    cost = StepCost(np.array([1, 64]), np.array([1, 4]), np.array([1, 400, 4000]), cells)
    rounds = LogNormal(600, 3000, 0.8, 0.5).draw(6, 4, prompt_tokens=50)
    outcome, _ = play(rounds, cost=cost, max_num_seqs=5)
    done, queue, running, total = np.zeros(24, int), list(range(24)), [], 0.0
    while queue or running:
        while queue and len(running) < 5:
            running.append(queue.pop(0))
        total += float(cost.step_ms(len(running), len(running), 50 + done[running].mean())[0])
        done[running] += 1
        running = [i for i in running if done[i] < rounds.lengths[i]]
    assert outcome.seconds == pytest.approx(total / 1e3)
    assert outcome.tokens == rounds.num_tokens


@pytest.mark.parametrize("policy", ["never", "threshold", "goodput", "always"])
@pytest.mark.parametrize("dp_synchronous", [False, True])
def test_every_token_comes_once_and_twice_the_same(policy, dp_synchronous):
    rounds = LogNormal(200, 900, 0.7, 0.4).draw(8, 4)
    table = accepting((3, 3), (3, 1), (2, 0), (0, 0), (3, 2))
    arguments = {"policy": policy, "table": table, "replicas": 3, "dp_synchronous": dp_synchronous, "max_num_seqs": 6}
    outcome, played = play(rounds, **arguments)
    again, _ = play(rounds, **arguments)
    assert outcome == again
    assert outcome.tokens == rounds.num_tokens
    assert outcome.wasted == outcome.drafted - outcome.accepted >= 0
    assert max(t["running"].max() for t in played[0].timelines) == 6
    assert (outcome.switched_on > 0) == (policy != "never")


def test_goodput_drafts_what_pays_alone():
    rounds, table = work(*[300] * 8), accepting((3, 1))
    cheap, dear = (play(rounds, "goodput", cost=linear(10.0, 0.0, token), table=table)[0] for token in (0.01, 20.0))
    assert cheap.switched_on > 0.9 and cheap.drafted > 1000
    assert dear.drafted == 0 and dear.seconds == play(rounds, cost=linear(10.0, 0.0, 20.0))[0].seconds


def test_more_requests_than_the_threshold_run_at_first():
    timeline = {"running": np.array([1, 9, 8, 3]), "end_ms": np.array([10.0, 30.0, 60.0, 100.0])}
    assert tail_seconds(timeline, 8) == pytest.approx(0.07)
    assert tail_seconds(timeline, 9) == pytest.approx(0.1)


def test_mistakes_are_said():
    with pytest.raises(ValueError, match="replicas=0: expected at least 1"):
        Cluster(replicas=0)
    with pytest.raises(ValueError, match="'nowhere': neither a file nor one of qwen3_235b"):
        load_step_cost("nowhere")
    with pytest.raises(ValueError, match="mean 10: expected at least 1 and less than the cap 5"):
        LogNormal(10, 5, 1.0, 0.5)


def test_log_normal_lengths_have_the_mean_the_cap_and_the_correlation():
    lengths = LogNormal(1000, 4000, 0.7, 0.5).draw(2000, 8, seed=1).lengths.reshape(2000, 8)
    assert lengths.mean() == pytest.approx(1000, rel=0.02) and lengths.max() == 4000
    logs = np.log(lengths[(lengths < 4000).all(axis=1)])
    between = logs.mean(axis=1).var() - logs.var(axis=1, ddof=1).mean() / 8
    assert between / (between + logs.var(axis=1, ddof=1).mean()) == pytest.approx(0.5, abs=0.1)
    assert np.array_equal(lengths.ravel(), LogNormal(1000, 4000, 0.7, 0.5).draw(2000, 8, seed=1).lengths)
