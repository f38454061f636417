"""Further paths that a step verifies: chosen by what they bring and what they cost."""

import numpy as np
import pytest

from sam.switch.draft_tokens import add_rows
from sam.switch.goodput import Goodput
from sam.switch.policies import make_policy
from sam.switch.policy import StepState
from sam.switch.step_cost import linear

ACCEPTANCE, OFFSETS = np.array([0.5, 0.2, 0.1], np.float32), np.array([0, 1, 3])
OVERHEAD = np.array([2, 2])


@pytest.mark.parametrize("cost, expected", [(np.ones(20), [1, 2]), (1.0 + 0.1 * np.arange(20), [0, 0])])
def test_rows_are_added_while_they_raise_tokens_per_millisecond(cost, expected):
    """Free rows are all taken, whole where a longer one brings more for each token; dear ones never."""
    own, tokens = add_rows(ACCEPTANCE, OFFSETS, OVERHEAD, 0, 1, 1, 0.9, cost, 0.0)
    assert own.tolist() == expected
    assert tokens == pytest.approx(0.9 + sum(ACCEPTANCE) * (expected[1] > 0), abs=1e-6)


def test_a_row_that_does_not_fit_the_table_is_left_out():
    own, tokens = add_rows(ACCEPTANCE, OFFSETS, OVERHEAD, 0, 1, 1, 0.9, np.ones(4), 0.0)
    assert own.tolist() == [0, 0] and tokens == 0.9


def test_rows_of_a_uniform_step_cost_a_whole_row():
    """Free up to 4 draft tokens: one row of three fits beside one draft token, one of four does not."""
    cost = np.array([1.0] * 5 + [100.0] * 20)
    assert add_rows(ACCEPTANCE, OFFSETS, OVERHEAD, 0, 1, 1, 0.9, cost, 0.0)[0].tolist() == [1, 0]
    assert add_rows(ACCEPTANCE, OFFSETS, OVERHEAD, 4, 1, 1, 0.9, cost, 0.0)[0].tolist() == [0, 0]


def goodput(per_token, **settings):
    return Goodput(3, linear(10.0, 0.0, per_token), paths=3, **settings)


def test_goodput_takes_free_rows_and_leaves_dear_ones():
    state, drafts = StepState(1), (np.array([0.9], np.float32), np.array([0, 1]))
    for per_token, own in ((1e-6, [1, 2]), (5.0, [0, 0])):
        policy = goodput(per_token)
        policy.choose(state, *drafts)
        assert policy.choose_paths(state, 1, ACCEPTANCE, OFFSETS, OVERHEAD).tolist() == own


def test_the_table_reaches_to_the_most_tokens_of_all_paths():
    assert len(goodput(0.1).step_ms(StepState(4))) == 4 * (3 + 2 * 4) + 1
    uniform = goodput(0.1, uniform=True).step_ms(StepState(4))
    assert np.all(uniform[1:13] == uniform[12]) and uniform[16] > uniform[12]


def test_accepted_tokens_of_further_paths_are_expected_too():
    """Drafting pauses where they are not right, as it does with drafts alone, only sooner."""
    steps = {}
    for paths in (False, True):
        policy, state, steps[paths] = goodput(1e-6), StepState(1), 0
        while policy.plan(state).budget:
            policy.choose(state, np.array([0.5], np.float32), np.array([0, 1]))
            if paths:
                policy.choose_paths(state, 1, np.array([0.4], np.float32), np.array([0, 1]), np.array([1]))
            policy.observe(state, 3 if paths else 1, 0, 10.0)
            steps[paths] += 1
    assert 3 < steps[True] < steps[False] < 20


def test_other_policies_verify_all_paths():
    always = make_policy("always", 3, 0, paths=4)
    assert always.choose_paths(StepState(1), 3, ACCEPTANCE, OFFSETS, OVERHEAD).tolist() == [1, 2]
