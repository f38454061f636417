"""The proposer tells its history which requests start and end."""

import pytest

from sam.vllm.hints import RequestHints
from tests.sam.history.kept import kept as kept_in
from tests.sam.vllm.model_runner import make_proposer


@pytest.fixture
def make(tmp_path, monkeypatch):
    made = []

    def one():
        made.append(make_proposer(scope="history", history_path=str(tmp_path / "history")))
        return made[-1]

    yield one
    for proposer in made:
        proposer.tracked.history.stop()


def kept(tmp_path, prompt):
    return sum(kept_in(tmp_path / "history", prompt), [])


def test_the_last_responses_of_a_rollout_are_kept_at_the_weight_sync(make, tmp_path):
    proposer = make()
    runner = proposer.runner
    runner.add("a", [1, 2])
    runner.step(proposer, ["a"], {"a": [3, 4, 5]})
    runner.requests.clear()  # it has ended, and no step follows
    proposer.weights_updated()
    proposer.tracked.history.stop()
    assert kept(tmp_path, [1, 2]) == [3, 4, 5] and proposer.counters["draft_errors"] == 0


@pytest.mark.parametrize(
    ("output", "limit", "written"),
    [
        ([4, 5, 6], 5, []),  # its response goes on: the next part begins with these tokens
        ([4, 5, 6, 7, 7], 5, []),  # and drafts behind its end, which were verified
        ([4, 5, 2], 5, [3, 4, 5, 2]),  # 2 ends a response
        ([4, 2, 7, 7], 5, [3, 4, 2, 7, 7]),
        ([4, 5], 5, [3, 4, 5]),  # aborted
        ([4, 5, 6], 4, [3, 4, 5, 6]),
    ],
)
def test_of_a_response_in_parts_the_whole_is_kept_once(make, tmp_path, output, limit, written):
    """A part of three tokens, after one that had the token 3."""
    from vllm import SamplingParams

    proposer = make()
    runner = proposer.runner
    hints = RequestHints(prompt_tokens=2, response_limit=limit)
    runner.add("a", [1, 2, 3], SamplingParams(max_tokens=3, stop_token_ids=[2], extra_args=hints.extra_args()))
    runner.step(proposer, ["a"], {"a": output})
    runner.requests.clear()
    proposer.weights_updated()
    proposer.tracked.history.stop()
    assert kept(tmp_path, [1, 2]) == written and proposer.counters["draft_errors"] == 0


def test_a_new_process_drafts_what_an_earlier_one_wrote(make):
    first = make()
    first.runner.add("a", [1, 2])
    first.runner.step(first, ["a"], {"a": [3, 4, 5, 6]})
    first.runner.requests.clear()
    first.weights_updated()
    first.tracked.history.stop()
    proposer = make()
    runner = proposer.runner
    runner.add("b", [1, 2])
    assert runner.step(proposer, ["b"], {"b": [9]})["b"] == []
    proposer.tracked.history._asked.join()
    runner.step(proposer, ["b"], {"b": [8]})
    assert runner.step(proposer, ["b"], {"b": [3]})["b"] == [4, 5, 6]


def test_a_request_that_cannot_be_tracked_is_forgotten(make):
    proposer = make()
    proposer.runner.add("a", [])
    proposer.runner.step(proposer, ["a"], {"a": [3]})
    assert proposer.counters["untracked_requests"] == 1 and not proposer.tracked.history._keys


def test_a_history_that_cannot_be_written_changes_no_draft(tmp_path):
    (tmp_path / "file").write_text("")
    drafts = []
    for settings in ({}, {"scope": "history", "history_path": str(tmp_path / "file" / "history")}):
        proposer = make_proposer(**settings)
        proposer.runner.add("a", [1, 2])
        drafts.append([proposer.runner.step(proposer, ["a"], {"a": [token]}) for token in (3, 1, 2, 3)])
    assert drafts[0] == drafts[1] and proposer.counters["draft_errors"] == 0
    proposer.tracked.history.stop()
