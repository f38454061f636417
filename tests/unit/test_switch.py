"""When drafting is on, and how likely a draft token must be to be worth verifying."""

import pytest

from sam.switch import StepState, break_even_survival, make_policy


@pytest.mark.parametrize("running, budget", [(1, 3), (8, 3), (9, 0), (400, 0)])
def test_threshold_is_the_published_switch(running, budget):
    policy = make_policy("threshold", 3, 8)
    assert policy.draft_budget(StepState(running)) == budget
    assert policy.min_survival(StepState(running)) == 0.0


def test_always_and_never():
    assert make_policy("always", 5, 0).draft_budget(StepState(10_000)) == 5
    assert make_policy("never", 5, 100).draft_budget(StepState(0)) == 0


@pytest.mark.parametrize("rows", [1, 7, 64, 500])
@pytest.mark.parametrize("fixed", [1, 60, 300])
def test_a_token_at_break_even_leaves_the_time_per_token_as_it_is(rows, fixed):
    survival = break_even_survival(rows, fixed)
    without = (fixed + rows) / rows
    assert (fixed + rows + 1) / (rows + survival) == pytest.approx(without)
    assert (fixed + rows + 1) / (rows + 1.1 * survival) < without < (fixed + rows + 1) / (rows + 0.9 * survival)


@pytest.mark.parametrize("settings", [("threshold", 0, 8), ("threshold", 3, -1), ("threshold", 3, 8, -1), ("x", 3, 8)])
def test_bad_settings_are_named(settings):
    with pytest.raises(ValueError, match="expected"):
        make_policy(*settings)
