"""Goodput where data-parallel ranks wait for the slowest: drafts are free while another rank takes longer anyway."""

import numpy as np
import pytest

from sam.switch.policies import Goodput
from sam.switch.policy import StepState
from sam.switch.step_cost import StepCost, linear
from tests.sam.switch.test_goodput import drafts_of


def dear_drafts(token):
    """20 ms whatever requests run, and `token` for each of their drafts, as where attention slows down with them."""
    requests, tokens = np.array([1, 64]), np.array([1, 16])
    cells = 20.0 + token * requests[:, None] * (tokens[None, :] - 1)
    return StepCost(requests, tokens, np.array([1]), cells[..., None])


ALIKE, DEAR_REQUESTS = linear(20.0, 0.0, 0.5), linear(20.0, 2.0, 0.5)  # the latter as where a long context is read


def chosen(policy, running, rows_elsewhere, acceptance):
    """Tokens of drafts as long as may be, all of one acceptance probability."""
    longest = policy.num_speculative_tokens
    acceptance, offsets = np.full(running * longest, acceptance, np.float32), np.arange(running + 1) * longest
    state = StepState(running, max_num_tokens_other_dp_ranks=rows_elsewhere)
    return int(policy.choose(state, acceptance, offsets).sum()) if policy.plan(state).budget else 0


@pytest.mark.parametrize(
    ("k", "table", "running", "cases"),
    [
        # 20 rows are four requests at least, 5 ms: so much take one request and three drafts. `cases`: rows elsewhere,
        # acceptance, tokens chosen.
        (4, linear(1.0, 0.0, 1.0), 1, [(0, 0.2, 0), (20, 0.2, 3), (16, 0.01, 3), (15, 0.01, 2)]),
        # With 16 rows elsewhere 12 drafts would be "free" where drafts cost more than requests; but those 16 requests
        # take 20 ms, and our 4 and their drafts 26.
        (3, dear_drafts(0.5), 4, [(16, 0.05, 0), (16, 0.3, 12)]),
        # Of 32 rows 24 may be drafts: 8 requests take no longer than our own.
        (3, DEAR_REQUESTS, 8, [(32, 0.01, 0)]),
        (3, DEAR_REQUESTS, 2, [(32, 0.01, 6)]),
    ],
)
def test_drafts_are_free_while_another_rank_takes_longer_and_no_further(k, table, running, cases):
    for rows_elsewhere, acceptance, expected in cases:
        assert chosen(Goodput(k, table), running, rows_elsewhere, acceptance) == expected


@pytest.mark.parametrize("table", [ALIKE, dear_drafts(0.5), linear(20.0, 0.5, 0.5)])
def test_the_drafts_of_two_ranks_do_not_justify_each_other(table):
    policies, rows, drafted = [Goodput(3, table), Goodput(3, table)], [8, 8], []
    for step in range(12):
        drafted.append([chosen(policies[i], 8, rows[1 - i], 0.9 if step < 2 else 0.02) for i in range(2)])
        rows = [8 + n for n in drafted[-1]]
    assert drafted == [[24, 24]] * 2 + [[0, 0]] * 10


def test_requests_beyond_the_table_are_not_waited_for():
    cells = np.array([[20.0, 21.0], [24.0, 28.0]])[..., None]
    policy = Goodput(3, StepCost(np.array([1, 8]), np.array([1, 4]), np.array([1]), cells))
    wait = [policy.step_ms(StepState(1, max_num_tokens_other_dp_ranks=rows))[0] for rows in (1, 32, 36, 4096)]
    assert wait == pytest.approx([20.0, 24.0, 24.0, 24.0])


@pytest.mark.parametrize("seed", range(4))
def test_no_token_below_the_floor_would_be_verified(seed):
    rng = np.random.default_rng(seed)
    running, elsewhere = int(rng.integers(1, 12)), int(rng.integers(0, 120))
    state = StepState(running, max_num_tokens_other_dp_ranks=elsewhere)
    policy = Goodput(4, linear(10.0, *rng.random(2)))
    plan, (acceptance, offsets) = policy.plan(state), drafts_of(rng, running, 4)
    taken = [acceptance[offsets[i] : offsets[i] + n] for i, n in enumerate(policy.choose(state, acceptance, offsets))]
    assert plan.budget == 4 and np.concatenate(taken).min(initial=1.0) >= plan.min_acceptance


def test_only_steps_that_no_other_rank_can_have_held_up_are_learnt_from():
    for table, running, drafted, rows_elsewhere, learns in (
        (ALIKE, 8, 8, 16, True),
        (linear(20.0, 0.0, 0.0), 8, 8, 17, False),  # whatever the table says
        (DEAR_REQUESTS, 4, 12, 15, False),  # they may be 15 requests
        (dear_drafts(0.5), 16, 0, 12, False),  # they may be 3 requests with 9 drafts
        (dear_drafts(0.5), 16, 9, 12, True),
    ):
        policy = Goodput(3, table)
        policy.observe(StepState(running, max_num_tokens_other_dp_ranks=rows_elsewhere), drafted, drafted, 45.0)
        assert any(policy.cost.correction.terms) == learns
