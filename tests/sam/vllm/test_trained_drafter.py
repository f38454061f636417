"""What a draft model beside sam is asked in each step, with passes that are made up; and drafts that come late."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.drafting.shape import FILLER
from sam.drafting.texts import Drafts
from sam.switch.policies import Goodput
from sam.switch.policy import StepState
from sam.switch.step_cost import linear
from sam.vllm.tracked_requests import TrackedBatch
from tests.sam.engine.async_cpu import Event

drafter = pytest.importorskip("sam.vllm.trained.drafter")
K, LENGTH, RIGHT, OF_SAM, VOCABULARY, NO_TOKEN = 3, 64, 7, 5, 100, -1


class MadeUpPasses:
    """Drafts 7s, which are right; `asked` is what a step needs."""

    longest_text = LENGTH

    def __init__(self):
        batch = {"no_penalties": True, "bad_words_token_ids": {}, "thinking_budget_state_holder": None}
        self.runner = SimpleNamespace(
            requests={"a": object()},
            model_config=SimpleNamespace(get_vocab_size=lambda: VOCABULARY),
            input_batch=SimpleNamespace(req_ids=["a"], **batch),
            input_ids=SimpleNamespace(gpu=torch.zeros(8, dtype=torch.int32)),
        )
        self.written, self.asked, self.token = None, [], RIGHT

    def missing(self, batch):
        self.asked.append("missing")
        return np.ones_like(batch.lengths)

    def draft(self, batch, missing, count):
        self.asked.append("draft")
        tokens = torch.full((len(batch.ids), count), RIGHT)
        tokens[:, 1:] = self.token
        return drafter.Chosen(tokens)

    def restore(self):
        self.asked.append("restore")


@pytest.fixture
def trained():
    made = drafter.TrainedDrafter(MadeUpPasses(), K, {})
    made.pass_cost = drafter.PassCost(np.array([1, 101]), np.array([0.01, 0.02]))
    made.pass_cost.observe = lambda *_unused: None  # no clock
    return made


def batch_of(ids, lengths, text=RIGHT):
    nothing = np.zeros(0, int)
    return TrackedBatch(
        list(range(len(ids))), ids, np.array(lengths), np.full((len(ids), LENGTH), text, np.int32), nothing, nothing
    )


def step(trained, length):
    """What sam's draft of one token, little expected of it, becomes in a step of a text of 7s; and what was asked."""
    trained.passes.asked.clear()
    of_sam = np.array([OF_SAM], np.int32), np.array([0, 1]), np.array([0.05], np.float32)
    policy = Goodput(K, linear(10.0, 0.0, 1 / 64))
    found = trained.combine(policy, StepState(1), K, batch_of(["a"], [length]), Drafts(*of_sam))
    return found.token_ids.tolist(), list(trained.passes.asked)


def test_it_drafts_where_more_is_expected_of_it_and_learns(trained):
    assert step(trained, 4) == ([RIGHT] * K, ["missing", "draft"])
    before = trained.acceptance.shares
    assert step(trained, 8)[0] == [RIGHT] * K and (trained.acceptance.shares > before).all()
    assert trained.counters["draft_model_accepted_tokens"] == K and trained.counters["draft_model_steps"] == 2
    assert trained.arrive() > 0.0 and trained.arrive() == 0.0


def test_what_was_missed_is_not_looked_up_where_passes_would_not_pay_anyway(trained):
    trained.acceptance._all[0] = 1e6  # observed, none of it accepted
    assert step(trained, 4) == ([OF_SAM], [])
    assert trained.counters["draft_model_rests"] == 1


def test_no_pass_beyond_the_last_position(trained):
    assert step(trained, LENGTH - 1 - K) == ([RIGHT] * K, ["missing", "draft"])
    assert step(trained, LENGTH - K) == ([OF_SAM], [])


def test_requests_that_are_gone_are_forgotten(trained):
    kept = []
    trained.passes.written = SimpleNamespace(keep_only=lambda names: kept.append(list(names)))
    step(trained, 4)
    trained.passes.runner.requests = {"b": object()}
    step(trained, 8)
    assert kept == [["b"]]


def test_drafts_end_before_what_is_no_token(trained):
    trained.passes.token = VOCABULARY
    assert step(trained, 4)[0] == [RIGHT]
    assert trained.counters["draft_model_invalid_drafts"] == 1


def test_a_model_that_fails_leaves_sams_drafts_and_rests_until_the_weights_are_updated(trained):
    working, trained.run_passes = trained.run_passes, None
    for _ in range(drafter.MAX_ERRORS):
        assert step(trained, 4) == ([OF_SAM], ["missing"])
    assert step(trained, 4) == ([OF_SAM], [])
    assert trained.counters["draft_model_errors"] == drafter.MAX_ERRORS
    trained.run_passes = working
    trained.weights_updated()
    assert step(trained, 4)[0] == [RIGHT] * K


@pytest.fixture
def late(trained, monkeypatch):
    """Drafts that stay on the device."""
    monkeypatch.setattr(torch, "Event", Event)
    trained.reads_later = True
    return trained


def test_drafts_of_the_device_are_filled_in_and_learnt_a_step_later(late):
    assert step(late, 4)[0] == [FILLER] * K and late.counters["draft_model_drafted_tokens"] == 0
    late.fill_in(np.array([5]), {"a": [FILLER] * K})
    assert late.passes.runner.input_ids.gpu.tolist() == [0, 0, RIGHT, RIGHT, RIGHT, 0, 0, 0]
    assert late.arrive() >= 0.0 and late.counters["draft_model_drafted_tokens"] == K
    step(late, 8)
    assert late.counters["draft_model_accepted_tokens"] == K and late.counters["draft_model_errors"] == 0


def test_penalties_count_drafts_on_the_host(late):
    late.passes.runner.input_batch.no_penalties = False
    assert step(late, 4)[0] == [RIGHT] * K and late.coming is None


def test_drafts_that_cannot_be_put_in_fail_no_step(late):
    step(late, 4)
    late.passes.runner.input_ids = None
    late.fill_in(np.array([5]), {"a": [FILLER] * K})
    assert late.counters["draft_model_errors"] == 1
    late.coming._ended = None
    late.arrive()
    assert late.counters["draft_model_errors"] == 2 and late.coming is None


@pytest.fixture
def coming(monkeypatch):
    monkeypatch.setattr(torch, "Event", Event)
    tokens = torch.tensor([[1, 2, 3], [4, VOCABULARY, 6], [7, 8, NO_TOKEN]])
    plan, batch = drafter.Passes(3, np.ones(3, bool), 1.0), batch_of(["a", "b", "c"], [10, 20, 30])
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
    Event.reached = 0
    with pytest.raises(AssertionError):
        coming._began.elapsed_time(coming._ended)
    tokens, milliseconds = coming.arrive()
    assert tokens[1, 1] == VOCABULARY and tokens[2, 2] == NO_TOKEN and milliseconds >= 0
