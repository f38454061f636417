"""Goodput verifies the draft tokens that bring the most per second, learns step costs, and finds out wrong tables;
where data-parallel ranks wait for the slowest, drafts are free while another rank takes longer anyway."""

import itertools

import numpy as np
import pytest

from sam.switch.policies import LOSS_SHARE, Goodput, choose_lengths
from sam.switch.step_cost import StepCost, StepState, linear


def drafts_of(rng, requests, longest):
    """Acceptance falls within each draft; lengths from 0 to `longest`."""
    lengths = rng.integers(0, longest + 1, requests)
    acceptance = [np.sort(rng.random(n))[::-1] for n in lengths]
    return np.concatenate(acceptance).astype(np.float32), np.concatenate([[0], np.cumsum(lengths)])


def accepted_of(lengths, acceptance, offsets):
    return sum(float(acceptance[offsets[i] : offsets[i] + n].sum()) for i, n in enumerate(lengths))


@pytest.mark.parametrize("seed", range(6))
def test_no_choice_of_prefixes_is_better(seed):
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 5))
    drafts = acceptance, offsets = drafts_of(rng, requests, 4)
    cost = np.cumsum(rng.random(4 * requests + 1) * rng.choice([0.0, 0.3, 1.0], 4 * requests + 1)) + 1.0
    lengths, expected = choose_lengths(acceptance, offsets, requests, cost, 0.0)
    assert expected == pytest.approx(accepted_of(lengths, *drafts))
    choices = itertools.product(*(range(n + 1) for n in np.diff(offsets)))
    best = max((requests + accepted_of(chosen, *drafts)) / cost[sum(chosen)] for chosen in choices)
    assert (requests + expected) / cost[sum(lengths)] == pytest.approx(best, rel=1e-6)


def test_a_step_is_filled_up_to_a_captured_graph():
    drafts = np.full(12, 0.3, np.float32), np.arange(5) * 3
    for graph_sizes, chosen in (((), 0), ((1, 2, 8, 16), 4)):
        policy = Goodput(3, linear(10.0, 0.0, 5.0), graph_sizes)
        assert policy.choose(StepState(4), *drafts).sum() == chosen


def test_what_pays_depends_on_running_requests_and_context():
    assert Goodput(3, linear(0.001, 0.0, 1.0)).plan(StepState(400)).budget == 0, "no drafts are asked for"
    by_context = np.array([[[1.0, 100.0], [1.1, 400.0]]])
    policy = Goodput(4, StepCost(np.array([1]), np.array([1, 5]), np.array([100, 10_000]), by_context))
    for context, chosen in ((100, 4), (10_000, 0)):
        lengths = policy.choose(StepState(1, context=context), np.full(4, 0.6, np.float32), np.array([0, 4]))
        assert lengths.sum() == chosen


ONE = np.array([0, 1])  # offsets of one draft of one token


@pytest.mark.parametrize("acceptance, steps, least, most", [(0.1, 56, 40, 60), (0.1, 400, 120, 300), (0.9, 400, 0, 60)])
def test_misses_of_unlikely_drafts_add_up_and_pauses_grow(acceptance, steps, least, most):
    """One request whose first draft token is accepted so often by estimate, and never in truth: where a tenth of a
    token is expected of each, some 50 are verified until four are missed, then pauses grow."""
    policy, verified, state = Goodput(1, linear(63.0, 0.0, 0.1)), 0, StepState(1)
    for _ in range(steps):
        if policy.plan(state).budget:
            drafted = int(policy.choose(state, np.array([acceptance], np.float32), ONE).sum())
            policy.observe(state, drafted, 0, 63.1 + 0.1 * drafted)
            verified += drafted
    assert least <= verified <= most


@pytest.mark.parametrize("fixed, each, token", [(3.0, 0.1, 0.02), (1.0, 0.0, 0.5), (20.0, 0.3, 0.0)])
def test_a_wrong_table_is_corrected_by_what_steps_take(fixed, each, token):
    policy, rng = Goodput(4, linear(1.0, 0.0, 0.1)), np.random.default_rng(0)
    for _ in range(800):
        running = int(rng.integers(1, 65))
        drafted = int(rng.integers(0, 4 * running + 1))
        true = fixed + each * running + token * (running + drafted)
        policy.observe(StepState(running), drafted, drafted, true * rng.uniform(0.95, 1.05))
    for running in (4, 32):
        expected = fixed + each * running + token * (running + np.arange(4 * running + 1))
        assert policy.step_ms(StepState(running)) == pytest.approx(expected, rel=0.15)


# Draft tokens that seem too expensive are verified now and then: a table that says far too much is found out, and a
# right one costs next to nothing.
K = 4


def play(policy, requests, acceptance, true, steps):
    """Steps of `requests` whose draft tokens are accepted as the drafter says.

    Returns:
        Draft tokens verified in each step, and tokens brought by a millisecond.
    """
    rng, brought, milliseconds, drafted = np.random.default_rng(0), 0, 0.0, []
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
    return drafted, brought / milliseconds


@pytest.mark.parametrize(("requests", "times", "unit"), [(1, 10, 20.0), (24, 4, 20.0), (24, 4, 0.02), (96, 10, 20.0)])
def test_a_table_with_far_too_dear_draft_tokens_is_found_out(requests, times, unit):
    """It is right for steps without drafts; with all draft tokens they take `times` as long by the table. However short
    steps are: one that explores is always learnt from."""

    def true(running, drafted):
        return unit * (1.0 + 0.01 * running + 0.005 * drafted)

    sizes = np.array([1, 96])
    cells = np.stack([true(sizes, 0), times * true(sizes, 0)], axis=1)[:, :, None]
    policy = Goodput(K, StepCost(sizes, np.array([1, 1 + K]), np.array([1]), cells))
    drafted, speed = play(policy, requests, 0.5, true, 4000)
    # A request alone is paused now and then where its drafts happen to be wrong.
    assert (900 if requests > 1 else 850) < np.count_nonzero(drafted[3000:]) < 1000, "some steps tell what is without"
    assert speed > 1.15 * requests / true(requests, 0)


@pytest.mark.parametrize("requests, acceptance, least", [(1, 0.33, 1), (8, 0.33, 1), (96, 0.33, 1), (4, 0.02, 0)])
def test_a_table_that_is_right_costs_next_to_nothing(requests, acceptance, least):
    """A draft token takes what a request's own does, and brings a third of a token; hopeless drafts are never tried."""

    def true(running, drafted):
        return 1.0 + 20.0 * (running + drafted)

    policy = Goodput(K, linear(1.0, 0.0, 20.0))
    drafted, speed = play(policy, requests, acceptance, true, 6000)
    assert least <= np.count_nonzero(drafted) == policy.counters.get("exploring_steps", 0) < 60 * least + 1
    assert speed > (1.0 - 2 * LOSS_SHARE) * requests / true(requests, 0)


def test_further_paths_are_added_while_they_raise_tokens_per_millisecond():
    """Two paths of one request, of one and two tokens of their own, each a row that takes two tokens more."""
    own = np.array([0.5, 0.2, 0.1], np.float32), np.array([0, 1, 3]), np.array([2, 2])
    for token_ms, chosen in (
        (0.0, [1, 2]),  # free rows are all taken, whole where a longer one brings more for each token
        (0.6, [1, 0]),  # a row of two own tokens brings less than it takes
        (5.0, [0, 0]),
    ):
        policy = Goodput(1, linear(6.0, 0.0, token_ms), paths=8)
        drafted = policy.choose(StepState(1), np.array([0.9], np.float32), ONE).sum()
        assert policy.choose_paths(StepState(1), int(drafted), *own).tolist() == chosen


def dear_drafts(token):
    """20 ms whatever requests run, and `token` for each of their drafts, as where attention slows down with them."""
    requests, tokens = np.array([1, 64]), np.array([1, 16])
    cells = 20.0 + token * requests[:, None] * (tokens[None, :] - 1)
    return StepCost(requests, tokens, np.array([1]), cells[..., None])


ALIKE, DEAR_REQUESTS = linear(20.0, 0.0, 0.5), linear(20.0, 2.0, 0.5)  # the latter as where a long context is read


def tokens_chosen(policy, running, rows_elsewhere, acceptance):
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
        assert tokens_chosen(Goodput(k, table), running, rows_elsewhere, acceptance) == expected


@pytest.mark.parametrize("table", [ALIKE, dear_drafts(0.5), linear(20.0, 0.5, 0.5)])
def test_the_drafts_of_two_ranks_do_not_justify_each_other(table):
    policies, rows, drafted = [Goodput(3, table), Goodput(3, table)], [8, 8], []
    for step in range(12):
        drafted.append([tokens_chosen(policies[i], 8, rows[1 - i], 0.9 if step < 2 else 0.02) for i in range(2)])
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
