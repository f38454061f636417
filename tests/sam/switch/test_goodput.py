"""Goodput verifies the draft tokens that bring the most per second, and learns what steps really cost."""

import itertools

import numpy as np
import pytest

from sam.switch.draft_tokens import BINS, choose_lengths
from sam.switch.expected_cost import ALWAYS_LEARN_STEPS, LEARN_INTERVAL_MS
from sam.switch.goodput import MAX_PAUSE_STEPS, Goodput
from sam.switch.policy import StepState
from sam.switch.step_cost import StepCost, linear


def drafts_of(rng, requests, longest):
    """Acceptance falls within each draft; lengths from 0 to `longest`."""
    lengths = rng.integers(0, longest + 1, requests)
    acceptance = [np.sort(rng.random(n))[::-1] for n in lengths]
    # In the middle of a bin: tokens of a bin count as equal.
    whole = np.floor(np.concatenate(acceptance) * BINS) / BINS + 0.5 / BINS
    return whole.astype(np.float32), np.concatenate([[0], np.cumsum(lengths)])


def goodput_of(lengths, acceptance, offsets, requests, cost):
    kept = sum(float(acceptance[offsets[i] : offsets[i] + n].sum()) for i, n in enumerate(lengths))
    return (requests + kept) / cost[sum(lengths)]


@pytest.mark.parametrize("seed", range(12))
def test_no_choice_of_prefixes_is_better(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 5))
    acceptance, offsets = drafts_of(rng, requests, 4)
    cost = np.cumsum(rng.random(4 * requests + 1) * rng.choice([0.0, 0.3, 1.0], 4 * requests + 1)) + 1.0
    lengths, gain, brought = choose_lengths(acceptance, offsets, requests, cost, 0.0)
    best = max(
        goodput_of(chosen, acceptance, offsets, requests, cost)
        for chosen in itertools.product(*(range(n + 1) for n in np.diff(offsets)))
    )
    assert goodput_of(lengths, acceptance, offsets, requests, cost) == pytest.approx(best, rel=1e-6)
    assert gain == pytest.approx(best * cost[0] / requests - 1.0, abs=1e-6)
    assert brought == pytest.approx(sum(acceptance[offsets[i] : offsets[i] + n].sum() for i, n in enumerate(lengths)))


def test_a_gain_below_the_bar_is_not_taken():
    acceptance, offsets, cost = np.array([0.5], np.float32), np.array([0, 1]), np.array([1.0, 1.45])
    assert choose_lengths(acceptance, offsets, 1, cost, 0.0)[0].tolist() == [1]
    assert choose_lengths(acceptance, offsets, 1, cost, 0.1)[0].tolist() == [0]


def test_steps_are_filled_up_to_a_captured_graph():
    acceptance, offsets = np.full(12, 0.3, np.float32), np.arange(5) * 3
    steep = linear(10.0, 0.0, 5.0)
    assert Goodput(3, steep).choose(StepState(4), acceptance, offsets).sum() == 0
    assert Goodput(3, steep, graph_sizes=(1, 2, 8, 16)).choose(StepState(4), acceptance, offsets).sum() == 4


def test_a_uniform_step_costs_as_much_whichever_drafts_are_chosen():
    """One good draft beside three poor ones: alone it would pay, not with rows for all."""
    acceptance, offsets = np.array([0.9, 0.1, 0.1, 0.1], np.float32), np.arange(5)
    for cost_per_token, chosen in ((0.2, 4), (0.8, 0)):
        table = linear(4.0, 0.0, cost_per_token)
        assert Goodput(1, table, uniform=True).choose(StepState(4), acceptance, offsets).sum() == chosen
    assert Goodput(1, linear(4.0, 0.0, 0.8)).choose(StepState(4), acceptance, offsets).sum() == 1


def test_no_drafts_are_asked_for_where_none_could_pay():
    assert Goodput(3, linear(0.001, 0.0, 1.0)).plan(StepState(400)).budget == 0
    plan = Goodput(3, linear(63.0, 0.0, 1.0)).plan(StepState(63))
    assert plan.budget == 3 and plan.min_acceptance == pytest.approx(0.5, rel=0.01)


def test_drafts_that_do_not_pay_are_asked_for_less_and_less():
    policy = Goodput(1, linear(63.0, 0.0, 1.0))
    asked = []
    for _ in range(100):
        state = StepState(200)
        asked.append(policy.plan(state).budget)
        if asked[-1]:
            policy.choose(state, np.full(200, 0.6, np.float32), np.arange(201))
    assert asked[:2] == [1, 1] and sum(asked) < 12
    assert policy.counters["paused_steps"] == 100 - sum(asked)
    assert max(len(list(run)) for on, run in itertools.groupby(asked) if not on) < MAX_PAUSE_STEPS


def steps_that_draft(acceptance: float, steps: int) -> int:
    """Of `steps` of one request whose first draft token is accepted so often by estimate, and never in truth."""
    policy, verified = Goodput(1, linear(63.0, 0.0, 0.1)), 0
    for _ in range(steps):
        state = StepState(1)
        if policy.plan(state).budget == 0:
            continue
        drafted = int(policy.choose(state, np.array([acceptance], np.float32), np.array([0, 1])).sum())
        policy.observe(state, drafted, 0, 63.1 + 0.1 * drafted)
        verified += drafted
    return verified


def test_misses_of_unlikely_drafts_add_up_and_pauses_grow():
    # A tenth of a token is expected of each: some 50 are verified until four are missed, then pauses grow.
    assert 40 <= steps_that_draft(0.1, 56) <= 60
    assert 120 <= steps_that_draft(0.1, 400) <= 300
    assert steps_that_draft(0.9, 400) < 60


def test_speculation_ends_where_it_brings_next_to_nothing():
    policy, offsets = Goodput(1, linear(63.0, 0.0, 0.0)), np.array([0, 1])

    def verified(acceptance: float) -> bool:
        return bool(policy.choose(StepState(1), np.array([acceptance], np.float32), offsets).sum())

    # Drafts that cost nothing: on for a gain of a hundredth, off for less than half of one.
    assert [verified(p) for p in (0.008, 0.012, 0.008, 0.004, 0.008)] == [False, True, True, False, False]


@pytest.mark.parametrize("fixed, each, token", [(3.0, 0.1, 0.02), (1.0, 0.0, 0.5), (20.0, 0.3, 0.0)])
def test_a_wrong_table_is_corrected_by_what_steps_take(fixed, each, token):
    policy = Goodput(4, linear(1.0, 0.0, 0.1))
    rng = np.random.default_rng(0)
    for _ in range(800):
        running, drafted = int(rng.integers(1, 65)), 0
        drafted = int(rng.integers(0, 4 * running + 1))
        true = fixed + each * running + token * (running + drafted)
        policy.observe(StepState(running), drafted, drafted, true * rng.uniform(0.95, 1.05))
    for running in (4, 32):
        expected = fixed + each * running + token * (running + np.arange(4 * running + 1))
        assert policy.step_ms(StepState(running)) == pytest.approx(expected, rel=0.15)


def test_what_drafting_costs_at_all_is_not_taken_for_a_price_of_tokens():
    policy, rng = Goodput(8, linear(2.0, 0.0, 0.0)), np.random.default_rng(0)
    for _ in range(400):
        drafted = int(rng.integers(6, 9)) * int(rng.random() < 0.8)
        policy.observe(StepState(1), drafted, 0, (5.0 + (0.8 if drafted else 0.0)) * rng.uniform(0.97, 1.03))
    cost, floor = policy.step_ms(StepState(1)), policy.plan(StepState(1)).min_acceptance
    assert cost[0] == pytest.approx(5.0, rel=0.05) and cost[8] == pytest.approx(5.8, rel=0.05)
    assert cost[8] - cost[1] < 0.3 and floor < 0.01


def test_later_steps_teach_now_and_then():
    policy, taught = Goodput(2, linear(1.0, 0.0, 0.1)), []
    policy.cost.correction.observe = lambda *step: taught.append(step) or True
    for _ in range(ALWAYS_LEARN_STEPS):
        policy.observe(StepState(4), 0, 0, 1.5)
    assert len(taught) == ALWAYS_LEARN_STEPS
    for _ in range(10):
        policy.observe(StepState(4), 0, 0, LEARN_INTERVAL_MS / 5)
    assert len(taught) == ALWAYS_LEARN_STEPS + 2
    for _ in range(10):
        policy.observe(StepState(4), 0, 0, LEARN_INTERVAL_MS)  # so long that a lesson is nothing beside it
    assert len(taught) == ALWAYS_LEARN_STEPS + 12


def test_the_same_steps_give_the_same_decisions():
    def play():
        rng, policy, decisions = np.random.default_rng(1), Goodput(6, linear(5.0, 0.1, 0.1)), []
        for _ in range(200):
            state = StepState(int(rng.integers(1, 40)), context=float(rng.integers(1, 4000)))
            acceptance, offsets = drafts_of(rng, state.running, 6)
            if policy.plan(state).budget:
                decisions.append(policy.choose(state, acceptance, offsets).tolist())
            policy.observe(state, 3, 1, rng.uniform(4, 9))
        return decisions

    assert play() == play()


def test_costs_depend_on_the_context():
    cells = np.array([[[1.0, 100.0], [1.1, 400.0]]])
    table = StepCost(np.array([1]), np.array([1, 5]), np.array([100, 10_000]), cells)
    policy = Goodput(4, table)
    acceptance, offsets = np.full(4, 0.6, np.float32), np.array([0, 4])
    assert policy.choose(StepState(1, context=100), acceptance, offsets).sum() == 4
    assert policy.choose(StepState(1, context=10_000), acceptance, offsets).sum() == 0
