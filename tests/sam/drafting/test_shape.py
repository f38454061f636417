"""Drafts of a step are filled up to one length where its graph needs that, and otherwise left as they are."""

import numpy as np
import pytest

from sam.drafting.shape import FILLER, fill_up, is_uniform


@pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_auto_is_uniform_where_no_other_step_with_drafts_replays(mode):
    assert is_uniform("auto", mode) is (mode == "FULL_DECODE_ONLY")
    assert is_uniform("uniform", mode) and not is_uniform("ragged", mode)


@pytest.mark.parametrize(
    "drafts, emitted, room, filled, after",
    [
        ([[4, 5], [], [6]], [1, 2, 1], 9, 6, [[4, 5, FILLER], [FILLER] * 3, [6, FILLER, FILLER]]),
        ([[], [], []], [1, 1, 1], 9, 0, [[], [], []]),  # a step without drafts stays plain
        ([[4], [], []], [1, 0, 1], 9, 0, [[4], [], []]),  # beside a prompt no step is uniform
        ([[4], [5], []], [1, 1, 1], 2, 0, [[], [], []]),  # without room the step is plain
    ],
)
def test_fill_up(drafts, emitted, room, filled, after):
    assert fill_up(drafts, emitted, np.array([9, room, 9]), 3) == filled and drafts == after
