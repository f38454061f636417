"""What the drafter is told of an engine's requests, from what the runner and the scheduler say."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.vllm.v2.followed_requests import COUNTERS, FollowedRequests, Step


class Event:
    def __init__(self):
        self.waits = 0

    def synchronize(self):
        self.waits += 1


@pytest.fixture
def followed():
    requests = FollowedRequests(Drafter(max_draft_tokens=3), dict.fromkeys(COUNTERS, 0))
    requests.drafter, requests.counted = requests._drafter, requests._counters
    return requests


def scheduled(new=(), finished=()):
    listed = [
        SimpleNamespace(req_id=name, prefill_token_ids=text, prompt_len=length, sampling_params=None)
        for name, text, length in new
    ]
    return SimpleNamespace(scheduled_new_reqs=listed, finished_req_ids=set(finished))


def step(**tokens):
    """Of each request its kept tokens; what is behind them means nothing."""
    rows = np.full((len(tokens), 4), 999, np.int64)
    for row, kept in enumerate(tokens.values()):
        rows[row, : len(kept)] = kept
    return Step(list(tokens), rows, np.array([len(kept) for kept in tokens.values()], np.int32), Event())


def test_requests_are_followed_from_their_prompt_to_their_end(followed):
    followed.schedule(scheduled(new=[("a", [1, 2, 3], 3), ("b", [1, 2, 3], 3)]))
    followed.end_step(step(a=[4, 5], b=[]))  # b is in its prompt
    followed.read(0.0)
    assert followed.drafter.lengths(["a", "b"]).tolist() == [5, 3]
    followed.schedule(scheduled(finished=["a"]))
    last = step(b=[4])
    followed.end_step(last)
    followed.read(0.0)
    assert followed.rows_of(last) == [0] and followed.lengths(["b"]).tolist() == [4]
    # Drafts come from the sibling's text.
    assert followed.drafter.draft(["b"], np.array([1])).token_ids.tolist() == [5]
    assert followed.counted["tracked_requests"] == 2
    with pytest.raises(ValueError, match="not followed"):
        followed.drafter.lengths(["a"])


def test_steps_under_way_are_not_waited_for(followed):
    followed.schedule(scheduled(new=[("a", [1, 2, 3], 3)]))
    steps = [step(a=[token]) for token in range(4)]
    for one in steps:
        followed.end_step(one)
    followed.read(0.0, except_steps=3)
    assert [one.copied.waits for one in steps] == [1, 0, 0, 0]
    followed.read(0.0)
    assert [one.copied.waits for one in steps] == [1, 1, 1, 1]
    assert followed.drafter.lengths(["a"]).tolist() == [7]


def test_a_preempted_request_comes_back_with_its_text(followed):
    followed.schedule(scheduled(new=[("a", [1, 2, 3], 3)]))
    followed.end_step(step(a=[4, 5]))
    followed.schedule(scheduled(new=[("a", [1, 2, 3, 4], 3)]))  # the step's last token was thrown away
    followed.end_step(step(a=[5, 6]))
    followed.read(0.0)
    assert followed.drafter.lengths(["a"]).tolist() == [6] and followed.lengths(["a"]).tolist() == [6]
    followed.schedule(scheduled(new=[("a", [1, 2, 3, 4, 5, 6, 7, 8], 3)]))  # and here one was missed
    followed.read(0.0)
    assert followed.drafter.lengths(["a"]).tolist() == [8]


def test_a_request_of_whose_text_a_fault_lost_a_part_gets_no_drafts(followed, monkeypatch):
    followed.schedule(scheduled(new=[("a", [1, 2, 3], 3), ("b", [7, 2, 3], 3)]))
    followed.read(0.0)
    followed.end_step(step(a=[4]))
    with monkeypatch.context() as patched:
        patched.setattr(followed.drafter, "append", None)
        with pytest.raises(TypeError):
            followed.read(0.0)
    last = step(a=[5], b=[4])
    followed.end_step(last)
    followed.read(0.0)
    assert followed.rows_of(last) == [1] and followed.drafter.lengths(["b"]).tolist() == [4]


def test_requests_that_cannot_be_followed_are_counted(followed):
    followed.schedule(scheduled(new=[("a", [-5, 2], 2), ("_warmup_0_", [1], 1)]))
    followed.read(0.0)
    assert followed.counted["untracked_requests"] == 1  # the negative token; the warm-up is no request
