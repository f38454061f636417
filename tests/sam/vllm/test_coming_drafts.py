"""Drafts that the host does not know yet: where the device puts them, and what it puts where there is none."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.drafting.shape import FILLER
from sam.switch.draft_passes import Passes
from sam.vllm.trained.made_drafts import MadeDrafts
from tests.sam.engine.async_cpu import Event

VOCABULARY = 50


@pytest.fixture
def coming(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    module = pytest.importorskip("sam.vllm.trained.async_proposer")
    tokens = torch.tensor([[1, 2, 3], [4, VOCABULARY, 6], [7, 8, 9]])
    finite = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    plan = Passes(3, np.ones(3, bool), milliseconds=1.0)
    made = MadeDrafts(plan, ["a", "b", "c"], np.array([10, 20, 30]), tokens, finite)
    return module.ComingDrafts.begin(made, module._recorded(), VOCABULARY)


def filled(coming, request_ids, ends, verifying):
    """The step's input, of which a draft of the host is 90 and every other token 80."""
    input_ids = torch.full((int(ends[-1]),), 80, dtype=torch.int32)
    for name, end in zip(request_ids, ends.tolist(), strict=True):
        input_ids[end - len(verifying.get(name, ())) : end] = 90
    to, of = coming.places(request_ids, ends, verifying)
    input_ids[to] = coming.inputs.flatten()[of]
    return input_ids.tolist()


def test_each_draft_goes_behind_its_requests_last_token(coming):
    """In any order of the batch, beside requests that another source drafts for and that have no draft."""
    found = filled(coming, ["c", "x", "y", "a"], np.array([3, 5, 6, 10]), {"c": [0, 0], "x": [5], "a": [0, 0, 0]})
    assert found == [80, 7, 8, 80, 90, 80, 80, 1, 2, 3]


def test_what_is_no_token_is_one_that_may_be_verified(coming):
    found = filled(coming, ["b", "c"], np.array([4, 8]), {"b": [0, 0, 0], "c": [0, 0, 0]})
    assert found == [80, 4, FILLER, 6, 80, 7, 8, FILLER]


def test_a_draft_that_was_cut_or_filled_up_keeps_its_own_tokens(coming):
    """To the room of its request, or to the length of all drafts of a step."""
    found = filled(coming, ["a", "b"], np.array([2, 7]), {"a": [0], "b": [0, 0, 0, FILLER]})
    assert found == [80, 1, 80, 4, FILLER, 6, 90]


def test_nothing_for_requests_that_are_gone(coming):
    assert coming.places(["z"], np.array([4]), {"z": [1]}) == ([], [])
    assert coming.places(["a"], np.array([1]), {}) == ([], [])


def test_the_host_learns_tokens_and_time(coming):
    Event.reached = 0
    with pytest.raises(AssertionError):
        coming.began.elapsed_time(coming.ended)
    tokens, finite, milliseconds = coming.arrive()
    assert tokens[1, 1] == VOCABULARY and not finite[2, 2] and milliseconds >= 0


def test_drafts_that_cannot_be_put_in_fail_no_step(coming):
    """The input keeps its fillers, and what the host counts are fillers too."""
    module = pytest.importorskip("sam.vllm.trained.async_proposer")
    errors, drafts = [], {"a": [FILLER] * 3}
    proposer = SimpleNamespace(_coming=coming, _drafts=drafts, verifying=drafts, counters={"waited_steps": 0})
    proposer._runner = SimpleNamespace(input_batch=SimpleNamespace(req_ids=["a"]), input_ids=None, device=None)
    proposer.count_model_error = lambda: errors.append(1)
    module.AsyncPasses.fill_in(proposer, 1, np.array([4]))
    coming.inputs = None
    module.AsyncPasses._read_now(proposer)
    assert len(errors) == 2 and drafts == {"a": [FILLER] * 3} and proposer._coming is None
