"""What the drafter is told of an engine's requests, from what the runner and the scheduler say."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.drafting.drafter import Drafter
from sam.vllm.v2.followed_requests import COUNTERS, FollowedRequests, Step


class Followed:
    """Requests in an engine's steps, and what the drafter knows of them."""

    def __init__(self):
        self.drafter, self.counters = Drafter(max_draft_tokens=3), dict.fromkeys(COUNTERS, 0)
        self.requests = FollowedRequests(self.drafter, self.counters)

    def schedule(self, *new, finished=()):
        """`new`: name, text, and length of the prompt of each."""
        listed = [
            SimpleNamespace(req_id=name, prefill_token_ids=text, prompt_len=length, sampling_params=None)
            for name, text, length in new
        ]
        self.requests.schedule(SimpleNamespace(scheduled_new_reqs=listed, finished_req_ids=set(finished)))

    def step(self, **tokens):
        """Of each request its kept tokens; what is behind them means nothing."""
        rows = np.full((len(tokens), 4), 999, np.int64)
        for row, kept in enumerate(tokens.values()):
            rows[row, : len(kept)] = kept
        counts = np.array([len(kept) for kept in tokens.values()], np.int32)
        step = Step(list(tokens), rows, counts, SimpleNamespace(synchronize=lambda: None))
        self.requests.end_step(step)
        return step

    def lengths(self, *names):
        self.requests.read(0.0)
        return self.drafter.lengths(list(names)).tolist()


@pytest.fixture
def followed():
    return Followed()


def test_requests_are_followed_from_their_prompt_to_their_end(followed):
    followed.schedule(("a", [1, 2, 3], 3), ("b", [1, 2, 3], 3))
    followed.step(a=[4, 5], b=[])  # b is in its prompt
    assert followed.lengths("a", "b") == [5, 3]
    followed.schedule(finished=["a"])
    last = followed.step(b=[4])
    assert followed.lengths("b") == [4] and followed.requests.rows_of(last) == [0]
    # Drafts come from the sibling's text.
    assert followed.drafter.draft(["b"], np.array([1])).token_ids.tolist() == [5]
    assert followed.counters["tracked_requests"] == 2
    with pytest.raises(ValueError, match="not followed"):
        followed.lengths("a")


def test_a_preempted_request_comes_back_with_its_text(followed):
    followed.schedule(("a", [1, 2, 3], 3))
    followed.step(a=[4, 5])
    followed.schedule(("a", [1, 2, 3, 4], 3))  # the step's last token was thrown away
    followed.step(a=[5, 6])
    assert followed.lengths("a") == [6] and followed.requests.lengths(["a"]).tolist() == [6]
    followed.schedule(("a", [1, 2, 3, 4, 5, 6, 7, 8], 3))  # and here one was missed
    assert followed.lengths("a") == [8]


def test_requests_that_cannot_be_followed_get_no_drafts(followed, monkeypatch):
    """A fault lost a part of a's text; c has no tokens; a warm-up is no request."""
    followed.schedule(("a", [1, 2, 3], 3), ("b", [7, 2, 3], 3), ("c", [-5, 2], 2), ("_warmup_0_", [1], 1))
    followed.lengths("a")
    followed.step(a=[4])
    with monkeypatch.context() as patched, pytest.raises(TypeError):
        patched.setattr(followed.drafter, "append", None)
        followed.lengths("a")
    last = followed.step(a=[5], b=[4])
    assert followed.lengths("b") == [4] and followed.requests.rows_of(last) == [1]
    assert followed.counters["untracked_requests"] == 1
