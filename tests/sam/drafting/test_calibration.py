"""What a draft's raw probability is worth, by what became of earlier ones."""

import numpy as np
import pytest

from sam.drafting import calibration
from sam.drafting.calibration import BINS, DRAFTED, DRAFTS, OVERALL_FORGET, OVERALL_PRIOR, PRIOR, ROWS
from sam.drafting.drafter import Drafter

LONGEST = 4


@pytest.fixture
def weights():
    """Two tables, from row 3 on."""
    return np.zeros((3 + 2 * ROWS, 2))


def settle(weights, drafts, tokens):
    """Settle drafts, (token, row) each, with the tokens that came."""
    sequences = np.zeros((1, DRAFTS + 2 * LONGEST), np.int64)
    for position, (token, row) in enumerate(drafts):
        calibration.remember(sequences, 0, position, token, row)
    sequences[0, DRAFTED] = len(drafts)
    calibration.settle(weights, 3, sequences, 0, np.array(tokens, np.int32), 0, len(tokens))
    assert sequences[0, DRAFTED] == 0


def test_a_cell_counts_its_drafts_and_the_table_all_of_them(weights):
    sure, unsure = calibration.cell_of(3, 0, 0.96), calibration.cell_of(3, 1, 0.41)
    assert (sure, unsure) == (3 + 19, 3 + BINS + 8)
    settle(weights, [(7, sure), (8, unsure)], [7, 9])
    settle(weights, [(7, sure), (8, unsure)], [7])  # what would have come of the second is not known
    assert weights[sure].tolist() == [2, 2] and weights[unsure].tolist() == [0, 1]
    assert weights[3 + ROWS - 1] == pytest.approx([2, 2 * 0.975 + 0.425])
    assert not weights[3 + ROWS :].any(), "drafts of the other table"
    other = calibration.cell_of(3 + ROWS, 3, 1.0)
    settle(weights, [(1, other)], [2])
    assert weights[-1] == pytest.approx([0, 0.975]) and weights[other].tolist() == [0, 1]


def test_acceptance_is_the_raw_probability_at_first_and_what_was_counted_in_the_end(weights):
    row = calibration.cell_of(3, 0, 0.5)
    assert calibration.acceptance_of(weights, 3, row, 0.5) == 0.5
    weights[row] = 300, 3000
    weights[3 + ROWS - 1] = 32, 32
    assert calibration.acceptance_of(weights, 3, row, 0.5) == pytest.approx((300 + PRIOR * 0.5) / (3000 + PRIOR))


def test_drafts_that_failed_elsewhere_lower_a_cell_that_has_seen_none(weights):
    failed, unseen = calibration.cell_of(3, 0, 0.96), calibration.cell_of(3, 2, 0.31)
    for _ in range(20):
        settle(weights, [(1, failed)], [2])
    ratio = OVERALL_PRIOR / (20 * 0.975 + OVERALL_PRIOR)
    assert calibration.acceptance_of(weights, 3, unseen, 0.3) == pytest.approx(0.3 * ratio)
    for _ in range(200):
        settle(weights, [(1, failed)], [1])
    assert weights[3 + ROWS - 1, 1] < OVERALL_FORGET
    assert calibration.acceptance_of(weights, 3, unseen, 0.3) > 0.25, "what is long ago is forgotten"


def drafted(drafter, name, tokens):
    """Acceptance probability of every draft that is made while a request goes on with `tokens`, one a step."""
    steps = (drafter.step([name], np.array([token], np.int32), [0, 1], [LONGEST]) for token in tokens)
    return np.concatenate([drafts.acceptance for drafts in steps])


def test_where_nothing_repeats_few_drafts_are_believed_in_and_many_once_text_repeats():
    rng = np.random.default_rng(0)
    drafter = Drafter(max_draft_tokens=LONGEST)
    drafter.start("a", rng.integers(0, 200, 50).astype(np.int32))
    random = drafted(drafter, "a", rng.integers(0, 200, 2000))
    assert len(random) > 2000 and random.sum() < 40
    assert np.count_nonzero(random[len(random) // 2 :] > 0.1) <= 5
    sentence = rng.integers(0, 200, 50)
    repeated = drafted(drafter, "a", np.tile(sentence, 20))
    assert np.mean(repeated[-400:]) > 0.9
