"""Further paths of a batch: what a text may go on with beside its draft."""

import numpy as np

from sam.drafting.drafter import Drafter
from sam.drafting.further_paths import further_paths
from tests.sam.stepping import step, tokens

TEXT = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]


def drafting(*texts, k=3):
    drafter, new = Drafter(max_draft_tokens=k), {}
    for name, text in zip("abc", texts, strict=False):
        drafter.start(name, tokens(*text[:-2]))
        new[name] = text[-2:]
    return drafter, list(new), step(drafter, new, k)


def test_paths_leave_the_draft_and_each_other():
    drafter, ids, drafts = drafting([*TEXT, 1, 2])
    found = further_paths(drafter, ids, np.array([2]), 4)
    paths = [tuple(row[:length]) for row, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)]
    draft = tuple(drafts.token_ids[:2].tolist())
    assert draft == (3, 1) and len(paths) == len({draft, *paths}) - 1 == 3
    assert (4, 1) in paths and (3, 5) in paths
    for path, shared in zip(paths, found.shared.tolist(), strict=True):
        assert shared == 0 or any(path[:shared] == other[:shared] for other in {draft, *paths} - {path})
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
    a, b = (step(drafter, {"a": [4]}) for drafter in (one, other))
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.acceptance.tolist() == b.acceptance.tolist()
