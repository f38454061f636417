"""Further paths: what a text may go on with beside its draft."""

import numpy as np

from sam.drafting.drafter import Drafter
from sam.drafting.further_paths import further_paths
from tests.sam.stepping import step, tokens


def drafting():
    """A drafter, and the draft of its request."""
    drafter = Drafter(max_draft_tokens=3)
    drafter.start("a", tokens(1, 2, 3, 1, 2, 4, 1, 2, 3, 5))
    return drafter, step(drafter, {"a": [1, 2]})


def test_paths_leave_the_draft_and_each_other():
    drafter, drafts = drafting()
    found = further_paths(drafter, ["a"], np.array([2]), 4)
    paths = [tuple(row[:length]) for row, length in zip(found.tokens.tolist(), found.lengths.tolist(), strict=True)]
    draft = tuple(drafts.token_ids[:2].tolist())
    assert draft == (3, 1) and len(paths) == len({draft, *paths}) - 1 == 3
    assert (4, 1) in paths and (3, 5) in paths
    for path, shared in zip(paths, found.shared.tolist(), strict=True):
        assert shared == 0 or any(path[:shared] == other[:shared] for other in {draft, *paths} - {path})
    assert np.all(np.diff(found.acceptance, axis=1)[found.lengths == 2] <= 0)


def test_drafting_goes_on_as_if_no_paths_had_been_grown():
    (one, _), (other, _) = drafting(), drafting()
    further_paths(one, ["a"], np.array([3]), 4)
    a, b = (step(drafter, {"a": [4]}) for drafter in (one, other))
    assert a.token_ids.tolist() == b.token_ids.tolist() and a.acceptance.tolist() == b.acceptance.tolist()
