"""Step-cost tables: looked up between and beyond their points, and refused where they cannot be true; and what steps
take beyond them, which is learnt: what comes and goes is not taken for a price."""

import json

import numpy as np
import pytest

from sam.switch.step_cost import Correction, StepCost, linear

CELLS = np.array([[[10.0, 20.0], [12.0, 26.0]], [[14.0, 28.0], [30.0, 60.0]]])
TRUE = {"source": "a test", "requests": [1, 9], "tokens_per_request": [1, 3], "context": [100, 200],
        "milliseconds": CELLS.tolist()}  # fmt: skip


def test_a_file_s_table_is_looked_up_between_and_beyond_its_points(tmp_path):
    (path := tmp_path / "cost.json").write_text(json.dumps(TRUE))
    StepCost.load(path).save(path)
    table = StepCost.load(path)
    for requests, rows, context, expected in (
        (1, 3, 150, 19.0),
        (5, 5, 100, 12.0),
        (9, 27, 1000, 60.0),
        (1, 5, 100, 14.0),  # beyond the most tokens the last slope goes on
        (18, 18, 100, 28.0),  # beyond the most requests each brings what the last ones brought
    ):
        assert table.step_ms(requests, rows, context) == pytest.approx([expected])
    assert table.source == "a test"


@pytest.mark.parametrize(
    "content, message",
    [
        (TRUE | {"requests": [4, 2]}, r"requests=\[4, 2\]: expected rising integers from 1"),
        (TRUE | {"requests": [], "milliseconds": []}, "expected rising integers from 1"),
        (TRUE | {"milliseconds": CELLS[:, :, :1].tolist()}, r"shape \[2, 2, 1\]: the axes ask for \[2, 2, 2\]"),
        (TRUE | {"milliseconds": CELLS[::-1].tolist()}, "expected positive times that rise with requests and tokens"),
        (TRUE | {"milliseconds": [[["10"]]]}, "milliseconds: expected 3-dimensional numbers, got <U2 of shape"),
        (TRUE | {"context": [2**63, 2**63 + 1]}, "context=.*: expected rising integers from 1"),
        ({}, "not a step-cost table"),
        (None, "no such file; measure it again with sam profile"),
    ],
)
def test_what_cannot_be_true_is_one_line(tmp_path, content, message):
    path = tmp_path / "cost.json"
    if content is not None:
        path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as error:
        StepCost.load(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


TABLE = linear(5.0, 0.05, 0.02)


def by_table(table, requests, drafted):
    return float(table.step_ms(requests, requests + drafted, 100)[0])


@pytest.mark.parametrize("seed", range(3))
def test_a_busy_machine_s_noise_is_not_taken_for_a_price_of_tokens(seed):
    """Steps of few drafts take twice as long as they should on average, now and then four times."""
    correction, rng = Correction(TABLE), np.random.default_rng(seed)
    for _ in range(300):
        requests = int(rng.integers(1, 65))
        drafted = int(rng.integers(0, 2 * requests + 1))
        expected = by_table(TABLE, requests, drafted)
        correction.observe(requests, drafted, expected, expected + rng.gamma(0.5, 16.0))
    assert correction.extra_ms(8, 0) == pytest.approx(8.0, abs=4.0)
    assert abs(correction.terms[2]) < 0.02


def test_a_step_that_was_held_up_teaches_nothing_unless_they_all_are():
    """Of surprises in a row the shortest is believed: in the end each third step is held up for long, and the others
    take far more than the table says."""
    correction, rng = Correction(linear(1.0, 0.0, 0.0)), np.random.default_rng(0)
    correction.observe(4, 0, 1.0, 500.0)
    assert correction.extra_ms(4, 0) == 0.0
    for _ in range(40):
        correction.observe(4, 0, 1.0, 500.0)
    assert correction.extra_ms(4, 0) == pytest.approx(499.0, rel=0.2)
    correction = Correction(linear(1.0, 0.0, 0.0))
    for step in range(300):
        correction.observe(4, 0, 1.0, 450.0 if step % 3 == 0 else 20.0 * rng.uniform(0.9, 1.1))
    assert 1.0 + correction.extra_ms(4, 0) == pytest.approx(20.0, rel=0.1)


def test_a_table_that_is_far_too_high_is_no_reward_of_drafts():
    table, rng = linear(90.0, 0.05, 0.02), np.random.default_rng(0)
    correction = Correction(table, forward_only=True)
    for step in range(1500):
        drafted = int(rng.integers(4, 9)) if step >= 20 else 0  # first none, then in every step
        took = 14.0 + (1.0 + 0.6 * drafted if drafted else 0.0) + rng.normal(0, 1.0)
        correction.observe(1, drafted, by_table(table, 1, drafted), took)
    plain, with_drafts = (by_table(table, 1, n) + correction.extra_ms(1, n) for n in (0, 6))
    assert correction.terms[3] >= 0.0
    assert plain < 18.0 and with_drafts == pytest.approx(18.6, abs=1.0)
