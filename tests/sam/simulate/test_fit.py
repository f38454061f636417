"""Step costs from recorded steps: what was put in comes out."""

import numpy as np
import pytest

from sam.simulate.fit import fit_from_steps


def steps(count=4000, drafting=0.5, noise=0.0, stalls=0.0):
    """4 ms, 0.05 for each row, 0.02 for each request, 1.5 with drafts, 0.3 for each request that comes."""
    chance = np.random.default_rng(0)
    running = chance.integers(1, 65, count)
    drafted = np.where(chance.random(count) < drafting, chance.integers(1, 4 * running + 1), 0)
    admitted = np.where(chance.random(count) < 0.05, running, 0)
    milliseconds = 4 + 0.05 * (running + drafted) + 0.02 * running + 1.5 * (drafted > 0) + 0.3 * admitted
    milliseconds *= 1 + noise * chance.standard_normal(count)
    milliseconds += np.where(chance.random(count) < stalls, 60.0, 0.0)
    return running, drafted, milliseconds, admitted


def test_known_costs_come_out():
    fitted = fit_from_steps(*steps())
    assert fitted.drafts_seen and fitted.error < 0.01 and fitted.admit_ms == pytest.approx(0.3, rel=0.05)
    for requests, rows, expected in ((1, 1, 4.07), (16, 16, 5.12), (64, 64, 8.48), (8, 32, 7.26), (40, 200, 16.3)):
        assert fitted.cost.step_ms(requests, rows, 1)[0] == pytest.approx(expected, rel=0.03)


def test_noise_and_stalls_change_the_sum_not_the_shape():
    columns = steps(noise=0.1, stalls=0.01)
    fitted = fit_from_steps(*columns)
    ratio = fitted.cost.step_ms(64, 64, 1)[0] / fitted.cost.step_ms(1, 1, 1)[0]
    assert ratio == pytest.approx(8.48 / 4.07, rel=0.06)
    total = sum(fitted.cost.step_ms(r, r + d, 1)[0] for r, d in zip(columns[0], columns[1], strict=True))
    assert total + fitted.admit_ms * columns[3].sum() == pytest.approx(columns[2].sum(), rel=0.02)


def test_context_counts_where_it_is_known():
    running, drafted, milliseconds, admitted = steps()
    context = np.random.default_rng(1).uniform(100, 8000, len(running))
    fitted = fit_from_steps(running, drafted, milliseconds + 0.01 * running * context / 1024, admitted, context)
    longer = fitted.cost.step_ms(32, 32, 6144)[0] - fitted.cost.step_ms(32, 32, 1024)[0]
    assert longer == pytest.approx(0.01 * 32 * 5, rel=0.05)


def test_without_drafts_a_token_costs_what_a_request_costs():
    fitted = fit_from_steps(*steps(drafting=0.0)[:3])
    assert not fitted.drafts_seen and "no drafts seen" in fitted.cost.source
    assert fitted.cost.step_ms(8, 32, 1)[0] == pytest.approx(fitted.cost.step_ms(32, 32, 1)[0], rel=0.02)


def test_too_few_steps():
    with pytest.raises(ValueError, match="3 recorded engine steps: expected at least 20"):
        fit_from_steps(np.ones(3, int), np.zeros(3, int), np.ones(3))
