"""Drafts of a step are filled up to one length where its graph needs that, and otherwise left as they are."""

import numpy as np
import pytest

from sam.drafting.shape import FILLER, fill_up, is_uniform

ROOM = np.array([9, 9, 9])


@pytest.mark.parametrize("mode", [None, "NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"])
def test_auto_is_uniform_where_no_other_step_with_drafts_replays(mode):
    assert is_uniform("auto", mode) is (mode == "FULL_DECODE_ONLY")
    assert is_uniform("uniform", mode) and not is_uniform("ragged", mode)


def test_every_draft_becomes_as_long_as_a_whole_one():
    drafts = [[4, 5], [], [6, 7, 8]]
    assert fill_up(drafts, [1, 2, 1], ROOM, 3) == 4
    assert drafts == [[4, 5, FILLER], [FILLER] * 3, [6, 7, 8]]


def test_a_step_without_drafts_stays_plain():
    drafts = [[], [], []]
    assert fill_up(drafts, [1, 1, 1], ROOM, 3) == 0 and drafts == [[], [], []]


def test_beside_a_prompt_no_step_is_uniform():
    drafts = [[4], [], []]
    assert fill_up(drafts, [1, 0, 1], ROOM, 3) == 0 and drafts == [[4], [], []]


def test_without_room_for_a_whole_draft_the_step_is_plain():
    drafts = [[4], [5], []]
    assert fill_up(drafts, [1, 1, 1], np.array([9, 2, 9]), 3) == 0 and drafts == [[], [], []]
