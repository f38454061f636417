"""What a draft's raw probability is worth, by what became of earlier ones."""

import numpy as np
import pytest

from sam.drafting import calibration
from sam.drafting.calibration import ALL, CORPUS_TABLE, GROUP_TABLE, OVERALL_FORGET, OVERALL_PRIOR, PRIOR
from sam.drafting.drafter import Drafter
from sam.drafting.texts import make_sequences
from tests.sam.stepping import step

LONGEST = 4


@pytest.fixture
def tables():
    return calibration.make_acceptance()


def settle(tables, drafts, tokens, table=GROUP_TABLE):
    """Count a draft, (token, bin) each, against the tokens that came."""
    sequences = make_sequences(1, LONGEST)
    calibration.start_draft(sequences, 0, table)
    for position, (token, index) in enumerate(drafts):
        sequences.draft_tokens[0, position], sequences.draft_bins[0, position] = token, index
    sequences.texts["num_drafted"] = len(drafts)
    calibration.update_calibration(tables, sequences, 0, np.array(tokens, np.int32), 0, len(tokens))
    assert sequences.texts[0]["num_drafted"] == 0


def test_a_bin_counts_its_drafts_and_the_table_all_of_them(tables):
    sure, unsure = calibration.bin_of(0, 0.96), calibration.bin_of(1, 0.41)
    assert (sure, unsure) == (19, calibration.PROBABILITIES + 8)
    settle(tables, [(7, sure), (8, unsure)], [7, 9])
    settle(tables, [(7, sure), (8, unsure)], [7])  # whether the second would have been accepted is not known
    group, corpus = tables[GROUP_TABLE], tables[CORPUS_TABLE]
    assert group[sure].tolist() == (2, 2) and group[unsure].tolist() == (0, 1)
    assert group[ALL].tolist() == pytest.approx((2, 2 * 0.975 + 0.425))
    assert not corpus["expected"].any(), "drafts of the other table"
    certain = calibration.bin_of(3, 1.0)
    settle(tables, [(1, certain)], [2], CORPUS_TABLE)
    assert corpus[ALL].tolist() == pytest.approx((0, 0.975)) and corpus[certain].tolist() == (0, 1)


def test_acceptance_is_the_raw_probability_at_first_and_the_counted_one_in_the_end(tables):
    index = calibration.bin_of(0, 0.5)
    assert calibration.acceptance_probability(tables, GROUP_TABLE, index, 0.5) == 0.5
    tables[GROUP_TABLE, index] = 300, 3000
    tables[GROUP_TABLE, ALL] = 32, 32
    expected = (300 + PRIOR * 0.5) / (3000 + PRIOR)
    assert calibration.acceptance_probability(tables, GROUP_TABLE, index, 0.5) == pytest.approx(expected)


def test_drafts_that_failed_elsewhere_lower_a_bin_that_has_seen_none(tables):
    failed, unseen = calibration.bin_of(0, 0.96), calibration.bin_of(2, 0.31)
    for _ in range(20):
        settle(tables, [(1, failed)], [2])
    ratio = OVERALL_PRIOR / (20 * 0.975 + OVERALL_PRIOR)
    assert calibration.acceptance_probability(tables, GROUP_TABLE, unseen, 0.3) == pytest.approx(0.3 * ratio)
    for _ in range(200):
        settle(tables, [(1, failed)], [1])
    assert tables[GROUP_TABLE, ALL]["expected"] < OVERALL_FORGET
    assert calibration.acceptance_probability(tables, GROUP_TABLE, unseen, 0.3) > 0.25, "what is long ago is forgotten"


def drafted(drafter, name, tokens):
    """Acceptance probability of every draft that is made while a request goes on with `tokens`, one a step."""
    return np.concatenate([step(drafter, {name: [token]}, LONGEST).acceptance for token in tokens])


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
