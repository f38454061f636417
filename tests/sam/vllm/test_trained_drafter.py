"""Drafts of a trained drafter that come late: into the input of the next step, and to the host."""

import numpy as np
import pytest
import torch

from sam.drafting.shape import FILLER
from sam.vllm.tracked_requests import TrackedBatch
from tests.sam.engine.async_cpu import Event

drafter = pytest.importorskip("sam.vllm.trained.drafter")
VOCABULARY, NO_TOKEN = 100, -1


@pytest.fixture
def coming(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    tokens = torch.tensor([[1, 2, 3], [4, VOCABULARY, 6], [7, 8, NO_TOKEN]])
    nothing = np.zeros(0, int)
    batch = TrackedBatch([0, 1, 2], ["a", "b", "c"], np.array([10, 20, 30]), np.zeros((3, 64)), nothing, nothing)
    plan = drafter.Passes(3, np.ones(3, bool), 1.0)
    return drafter.ComingDrafts(plan, batch, drafter.Chosen(tokens), drafter.recorded_event(), VOCABULARY)


@pytest.mark.parametrize(
    ("request_ids", "ends", "drafts", "expected"),
    [
        # In any order of the batch, beside requests that another source drafts for and that have no draft.
        (
            ["c", "x", "y", "a"],
            [3, 5, 6, 10],
            {"c": [0, 0], "x": [5], "a": [0, 0, 0]},
            [80, 7, 8, 80, 90, 80, 80, 1, 2, 3],
        ),
        # What is no token is one that may be verified.
        (["b", "c"], [4, 8], {"b": [0, 0, 0], "c": [0, 0, 0]}, [80, 4, FILLER, 6, 80, 7, 8, FILLER]),
        # Cut to the room of a request, or filled up to the length of all drafts of a step.
        (["a", "b"], [2, 7], {"a": [0], "b": [0, 0, 0, FILLER]}, [80, 1, 80, 4, FILLER, 6, 90]),
        # Requests that are gone.
        (["z"], [4], {"z": [1]}, [80, 80, 80, 90]),
        (["a"], [1], {}, [80]),
    ],
)
def test_each_draft_goes_behind_its_requests_last_token(coming, request_ids, ends, drafts, expected):
    """Into an input in which a draft of the host is 90 and every other token 80."""
    input_ids = torch.full((ends[-1],), 80, dtype=torch.int32)
    for name, end in zip(request_ids, ends, strict=True):
        input_ids[end - len(drafts.get(name, ())) : end] = 90
    coming.put(input_ids, request_ids, np.array(ends), drafts)
    assert input_ids.tolist() == expected


def test_the_host_learns_tokens_and_time(coming):
    tokens, milliseconds = coming.arrive()
    assert tokens[1, 1] == VOCABULARY and tokens[2, 2] == NO_TOKEN and milliseconds >= 0
