"""Draft tokens that seem too expensive are verified now and then: a table that says far too much is found out, and a
right one costs next to nothing."""

import numpy as np
import pytest

from sam.switch.expected_cost import ALWAYS_LEARN_STEPS
from sam.switch.exploration import LOSS_SHARE, CostExploration
from sam.switch.goodput import Goodput
from sam.switch.policy import StepState
from sam.switch.step_cost import StepCost, linear

K = 4


def play(policy, requests, acceptance, true, steps, seed=0):
    """Steps of `requests` whose draft tokens are accepted as the drafter says.

    Returns:
        Draft tokens verified in each step, tokens brought in all, and milliseconds in all.
    """
    rng, brought, milliseconds, drafted = np.random.default_rng(seed), 0, 0.0, []
    cumulative = np.tile(np.float32(acceptance) ** np.arange(1, K + 1, dtype=np.float32), requests)
    state, offsets = StepState(requests), np.arange(requests + 1) * K
    for _ in range(steps):
        lengths = np.zeros(requests, np.int64)
        if policy.plan(state).budget:
            lengths = policy.choose(state, cumulative, offsets)
        accepted = int(np.minimum(lengths, rng.geometric(1.0 - acceptance, requests) - 1).sum())
        took = true(requests, int(lengths.sum())) * rng.uniform(0.97, 1.03)
        policy.observe(state, int(lengths.sum()), accepted, took)
        drafted.append(int(lengths.sum()))
        brought, milliseconds = brought + requests + accepted, milliseconds + took
    return drafted, brought, milliseconds


@pytest.mark.parametrize("requests", [1, 4, 24, 96])
@pytest.mark.parametrize("times", [4, 10])
def test_a_table_with_far_too_dear_draft_tokens_is_found_out(requests, times):
    """It is right for steps without drafts; with all draft tokens they take `times` as long by the table."""

    def true(running, drafted):
        return 20.0 + 0.2 * running + 0.1 * drafted

    sizes = np.array([1, 96])
    cells = np.stack([true(sizes, 0), times * true(sizes, 0)], axis=1)[:, :, None]
    policy = Goodput(K, StepCost(sizes, np.array([1, 1 + K]), np.array([1]), cells))
    drafted, brought, milliseconds = play(policy, requests, 0.5, true, 4000)
    # A request alone is paused now and then where its drafts happen to be wrong.
    assert np.count_nonzero(drafted[3000:]) > (900 if requests > 1 else 850)
    assert brought / milliseconds > 1.15 * requests / true(requests, 0)


@pytest.mark.parametrize("requests", [1, 8, 96])
def test_a_table_that_is_right_costs_next_to_nothing(requests):
    """A draft token takes what a request's own does, and brings a third of a token."""

    def true(running, drafted):
        return 1.0 + 20.0 * (running + drafted)

    policy = Goodput(K, linear(1.0, 0.0, 20.0))
    drafted, brought, milliseconds = play(policy, requests, 0.33, true, 6000)
    assert 0 < np.count_nonzero(drafted) == policy.counters["exploring_steps"] < 60
    assert brought / milliseconds > (1.0 - 2 * LOSS_SHARE) * requests / true(requests, 0)


def test_hopeless_drafts_are_never_tried():
    policy = Goodput(K, linear(1.0, 0.0, 20.0))
    drafted, _, _ = play(policy, 4, 0.02, lambda running, drafted: 1.0 + 20.0 * (running + drafted), 4000)
    assert not any(drafted) and "exploring_steps" not in policy.counters


def test_a_trial_is_learnt_from_however_short_steps_are():
    policy, learnt = Goodput(K, linear(1.0, 0.0, 1.0)), []
    policy.cost.correction.observe = lambda requests, drafted, *_: learnt.append(drafted) or True
    drafted, _, _ = play(policy, 1, 0.4, lambda running, drafted: 1e-3 * (1.0 + running + drafted), 3000)
    trials = [step for step in drafted[ALWAYS_LEARN_STEPS:] if step]
    assert trials and [step for step in learnt[ALWAYS_LEARN_STEPS:] if step] == trials


def test_a_trial_waits_for_what_it_costs_and_is_cut_where_that_is_much():
    acceptance, offsets = np.full(8, 0.9, np.float32), np.array([0, 4, 8])
    cost = 1.0 + np.arange(9) * np.array([0.5])

    def tried(steps, cost=cost):
        exploration = CostExploration()
        exploration.count_plain(steps)
        lengths, expected = exploration.choose(acceptance, offsets, 2, cost, 0.01)
        assert expected == pytest.approx(0.9 * lengths.sum(), rel=0.01)
        assert exploration.is_exploring == exploration.wanted(8) == lengths.any()
        return int(lengths.sum())

    whole = int(4.0 / LOSS_SHARE)  # 8 tokens take four steps more
    assert [tried(steps) for steps in (0, whole - 1, whole)] == [0, 0, 8]
    assert [tried(steps, 2 * cost - 1) for steps in (whole - 1, whole, 10 * whole)] == [0, 4, 4]
    assert tried(10 * whole, 1.0 + np.arange(9) * 5.0) == 0, "one token alone takes more than MAX_LOSS"
