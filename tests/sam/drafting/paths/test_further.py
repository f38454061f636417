"""Further paths of a batch: what a text may go on with beside its draft, and how often that is right."""

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.drafting.paths.further import MOST_EXPECTED, RIGHT_SHARE, ForkRate, FurtherPaths, further_paths

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]


def drafting(*texts, k=3):
    drafter = Drafter(max_draft_tokens=k)
    ids = [str(i) for i in range(len(texts))]
    for name, text in zip(ids, texts, strict=True):
        drafter.start(name, np.array(text[:-2], np.int32))
    tokens = np.array([token for text in texts for token in text[-2:]], np.int32)
    return drafter, ids, drafter.step(ids, tokens, 2 * np.arange(len(ids) + 1), np.full(len(ids), k))


def test_paths_leave_the_draft_and_each_other():
    drafter, ids, drafts = drafting([*TEXT, 1, 2])
    found = further_paths(drafter, ids, np.array([2]), 4)
    tokens = [tuple(row[:length]) for row, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)]
    draft = tuple(drafts.token_ids[:2].tolist())
    assert draft == (3, 1) and len(tokens) == len({draft, *tokens}) - 1 == 3
    assert (4, 1) in tokens and (3, 5) in tokens
    for path, shared in zip(tokens, found.shared.tolist(), strict=True):
        assert shared == 0 or any(path[:shared] == other[:shared] for other in {draft, *tokens} - {path})
    assert np.all(np.diff(found.acceptance, axis=1)[found.lengths == 2] <= 0)


def test_each_request_has_paths_of_its_own_and_its_own_depth():
    drafter, ids, _ = drafting([*TEXT, 1, 2], [7, 8, 9, 7, 8, 6, 7, 8], [50, 51, 52, 53])
    found = further_paths(drafter, ids, np.array([1, 3, 3]), 2)
    assert found.request.tolist() == [0, 1] and found.lengths.tolist() == [1, 3]
    assert found.tokens[0, 0] == 4
    assert not len(further_paths(drafter, ids, np.zeros(3), 2).request)


def test_drafting_goes_on_as_if_no_paths_had_been_grown():
    (one, ids, _), (other, _, _) = drafting([*TEXT, 1, 2]), drafting([*TEXT, 1, 2])
    further_paths(one, ids, np.array([3]), 4)
    more = (np.array([4], np.int32), np.array([0, 1]), np.array([3]))
    a, b = one.step(ids, *more), other.step(ids, *more)
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.acceptance.tolist() == b.acceptance.tolist()


def paths(*rows, request=None):
    """Of (shared, tokens, acceptance)."""
    shared, tokens, acceptance = zip(*rows, strict=True)
    lengths = np.array([len(one) for one in tokens])
    return FurtherPaths(
        np.zeros(len(rows), int) if request is None else np.array(request), np.array(tokens, np.int32), lengths,
        np.array(shared), np.array(acceptance, np.float32),
    )  # fmt: skip


def test_own_tokens_are_those_that_no_earlier_path_has():
    found = paths((0, [4, 1], [0.2, 0.1]), (1, [3, 5], [0.5, 0.25]))
    own, offsets = found.own(0.5)
    assert own.tolist() == pytest.approx([0.1, 0.05, 0.125]) and offsets.tolist() == [0, 2, 3]


def test_the_rate_is_how_often_first_own_tokens_are_right():
    """Two of four that the text reached were right, of which 1.6 were expected; nothing is said of the others."""
    rate, found = ForkRate(), paths((0, [4, 1], [0.4, 0.1]), (1, [3, 5], [0.5, 0.2]))
    assert rate.scale == pytest.approx(RIGHT_SHARE)
    begins, ends = np.array([0, 0]), np.array([2, 2])
    for text in ([4, 1], [3, 5], [3, 9], [8, 8]):
        rate.learn(found, np.array(text, np.int32), begins, ends)
    assert (rate._right, rate._expected) == pytest.approx((14 + 2, 20 + 4 * 0.4 + 2 * 0.4))
    rate.learn(found, np.array([3], np.int32), begins, np.array([1, 1]))  # the second path's token has not come
    assert (rate._right, rate._expected) == pytest.approx((16, 22.8))


def test_the_rate_forgets_slowly_and_raises_no_probability():
    rate, right = ForkRate(), paths((0, [4], [0.5]))
    for _ in range(int(4 * MOST_EXPECTED)):
        rate.learn(right, np.array([4], np.int32), np.array([0]), np.array([1]))
    assert rate.scale == 1.0 and rate._expected <= MOST_EXPECTED
    for _ in range(int(4 * MOST_EXPECTED)):
        rate.learn(right, np.array([5], np.int32), np.array([0]), np.array([1]))
    assert rate.scale < 0.6
