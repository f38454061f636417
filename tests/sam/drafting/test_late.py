"""An automaton that learns late is drafted from as if it had learnt: the missing tokens are walked, nothing changes."""

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.drafting.late import LateDrafter
from tests.sam.stepping import append, tokens

PROMPT = 0, 1, 2, 3, 4, 5, 6, 7, 8, 0


def draft(drafter):
    return drafter.draft(["a"], np.array([3])).token_ids.tolist()


@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ([5, 6], [7, 8, 0]),
        ([1, 2, 3, 90], [5, 6, 7]),  # 90 stands in the place of 4: on beside it
        ([1, 2, 3, 90, 91], [6, 7, 8]),  # and 91 in that of 5
        ([70, 71, 72], []),
    ],
)
def test_what_a_text_goes_on_with_however_late_it_is_learnt(late, new, expected):
    drafter = LateDrafter(Drafter(max_draft_tokens=3, cross_prompt=False), late)
    drafter.start("a", tokens(*PROMPT))
    for token in new:
        append(drafter, {"a": [token]})
    assert draft(drafter) == expected


def test_learnt_at_once_drafts_are_the_drafters_own():
    rng, own, late = np.random.default_rng(0), Drafter(max_draft_tokens=4), LateDrafter(Drafter(max_draft_tokens=4), 0)
    texts = {name: np.tile(rng.integers(0, 30, 40), 4) for name in ("a", "b")}
    for drafter in (own, late):
        for name, text in texts.items():
            drafter.start(name, tokens(*text[:9]))
    for i in range(9, 160, 3):
        drafts = [drafter.draft(["a", "b"], np.array([4, 2])) for drafter in (own, late)]
        assert drafts[0].token_ids.tolist() == drafts[1].token_ids.tolist()
        assert drafts[0].offsets.tolist() == drafts[1].offsets.tolist()
        for drafter in (own, late):
            append(drafter, {name: text[i : i + 3] for name, text in texts.items()})


def test_a_draft_changes_nothing_and_steps_are_learnt_in_their_turn():
    own = Drafter(max_draft_tokens=3, memory_budget_bytes=1 << 20)
    drafter, length = LateDrafter(own, 2), len(PROMPT)
    drafter.start("a", tokens(*PROMPT))
    for i, known in enumerate([length, length, length + 1, length + 2]):
        append(drafter, {"a": [i + 1]})
        before = [array.copy() for part in (own.store, own.memory, own.learned, own.sequences) for array in part]
        assert draft(drafter) == [*range(i + 2, i + 5)]
        after = [array for part in (own.store, own.memory, own.learned, own.sequences) for array in part]
        assert all(one.tobytes() == other.tobytes() for one, other in zip(before, after, strict=True))
        assert own.num_tokens("a") == known
    drafter.finish("a")
    assert own.store.groups["num_tokens"].sum() == len(PROMPT) + 4
