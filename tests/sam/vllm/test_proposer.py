"""The proposer follows requests by id through every change of the batch, and never fails a rollout."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.automaton.corpus_file import add_text, empty_corpus, save_corpus
from sam.drafting.shape import FILLER
from sam.switch.policies import Threshold
from sam.switch.queued_requests import PATIENCE_STEPS
from sam.switch.step_cost import linear
from sam.vllm.runner_hooks import PART, WAITING, note_waiting
from tests.sam.vllm.model_runner import LENGTH, make_proposer


@pytest.fixture
def proposer():
    return make_proposer()


def test_rows_change_and_drafts_stay_with_their_requests(proposer):
    runner = proposer._runner
    runner.add("a", [1, 2])
    runner.add("b", [5, 6])
    runner.step(proposer, ["a", "b"], {"a": [3, 1], "b": [7, 5]})
    assert runner.step(proposer, ["b", "a"], {"a": [2], "b": [6]}) == {"a": [3, 1, 2], "b": [7, 5, 6]}


def test_preempted_request_returns_with_tokens_it_was_not_followed_for(proposer):
    runner = proposer._runner
    for name, prompt in {"a": [1, 2], "b": [9]}.items():
        runner.add(name, prompt)
    runner.step(proposer, ["a", "b"], {"a": [3], "b": [8]})
    runner.step(proposer, ["b"], {"b": [7]})  # a is preempted: out of the batch, still a request
    assert proposer.counters["tracked_requests"] == 2
    runner.texts["a"] += [4, 1]  # as when a step's tokens were not shown to the proposer
    assert runner.step(proposer, ["b", "a"], {"a": [2], "b": [6]})["a"] == [3, 4, 1]
    assert proposer.drafter.num_tokens("a") == len(runner.texts["a"])
    assert proposer.counters["tracked_requests"] == 2 and proposer.counters["draft_errors"] == 0


def test_finished_and_aborted_requests_are_released_and_still_help_their_siblings(proposer):
    runner = proposer._runner
    for name in "ab":
        runner.add(name, [1, 2])
    runner.step(proposer, ["a", "b"], {"a": [3, 4, 5], "b": [6]})
    del runner.requests["a"], runner.requests["b"]
    runner.add("c", [1, 2])
    drafts = runner.step(proposer, ["c"], {"c": [3]})
    assert set(proposer.tracked.states) == {"c"} and "a" not in proposer.drafter._slots
    assert drafts["c"] == [4, 5]


def test_a_part_of_a_response_belongs_to_the_group_of_the_responses_own_prompt(proposer):
    runner = proposer._runner
    for name, prompt in {"a": [1, 2], "b": [1, 2, 3]}.items():
        runner.add(name, prompt)
    runner.requests["b"].sampling_params = SimpleNamespace(extra_args={PART: (2, 20)})
    drafts = runner.step(proposer, ["a", "b"], {"a": [3, 4, 5], "b": [4]})
    assert drafts["b"] == [5] and len(proposer.drafter.groups) == 1


def test_row_in_its_prompt_gets_no_drafts(proposer):
    runner = proposer._runner
    runner.add("a", [1, 2, 1])
    runner.add("b", [1, 2, 1, 2])
    drafts = runner.step(proposer, ["a", "b"], {"b": [1]})
    assert drafts["a"] == [] and drafts["b"]


def test_drafts_never_reach_beyond_the_models_length(proposer):
    runner = proposer._runner
    runner.add("a", [1, 2] * 30)
    for length, room in ((61, 2), (62, 1), (63, 0)):
        assert len(runner.step(proposer, ["a"], {"a": [1 if length % 2 else 2]})["a"]) <= room


def test_uniform_drafts_are_whole_for_every_request_or_for_none():
    proposer = make_proposer(draft_shape="uniform")
    runner = proposer._runner
    runner.add("a", [1, 2, 3, 1, 2])
    runner.add("b", [9])
    drafts = runner.step(proposer, ["a", "b"], {"a": [3], "b": [8]})
    assert drafts == {"a": [1, 2, 3], "b": [FILLER] * 3}
    assert proposer.drafted == 6 and proposer.counters["filled_draft_tokens"] == 3
    runner.texts["b"] += [7] * (LENGTH - 5)  # no room for three tokens
    assert runner.step(proposer, ["a", "b"], {"a": [1], "b": [7]}) == {"a": [], "b": []}
    assert proposer.drafted == 0 and proposer.counters["filled_draft_tokens"] == 3


def test_fault_is_counted_and_the_step_goes_on(proposer, monkeypatch):
    runner, said = proposer._runner, []
    monkeypatch.setattr("sam.vllm.proposer.logger.exception", said.append)
    runner.add("a", [1, 2, 1])
    proposer.drafter.step = None
    for _ in range(3):
        assert runner.step(proposer, ["a"], {"a": [2]}) == {"a": []}
    assert proposer.counters["draft_errors"] == 3
    assert len(said) == 1 and "drafting failed" in said[0]


def test_request_that_cannot_be_followed_gets_no_drafts_and_the_others_do(proposer, monkeypatch):
    runner, start = proposer._runner, proposer.drafter.start

    def start_short(request_id, prompt, policy_version):
        if len(prompt) > 10:
            raise ValueError("too long")
        start(request_id, prompt, policy_version)

    monkeypatch.setattr(proposer.drafter, "start", start_short)
    runner.add("long", [1, 2] * 10)
    runner.add("short", [1, 2, 1])
    for _ in range(3):
        drafts = runner.step(proposer, ["long", "short"], {"long": [1], "short": [2, 1]})
        assert drafts["long"] == [] and drafts["short"]
    assert (proposer.counters["untracked_requests"], proposer.counters["draft_errors"]) == (1, 0)
    del runner.requests["long"]
    runner.step(proposer, ["short"], {"short": [2]})
    assert not proposer.tracked.untracked


def test_history_outlives_the_step_and_old_policies_leave_first():
    proposer = make_proposer(scope="history", history_tokens=10)
    runner = proposer._runner
    for version, name in enumerate(("old", "new")):
        runner.add(name, [7 + version, 1])
        runner.step(proposer, [name], {name: [2, 3, 4]})
        del runner.requests[name]
        runner.step(proposer, [], {})
        proposer.weights_updated()
    assert proposer.counters["policy_version"] == 2
    assert proposer.counters["evicted_groups"] == 0
    runner.add("old again", [7, 1])
    assert runner.step(proposer, ["old again"], {"old again": [2]})["old again"] == [3, 4]


def test_corpus_is_drafted_from(tmp_path):
    corpus = empty_corpus(1 << 20)
    add_text(corpus, np.arange(30, dtype=np.int32))
    save_corpus(corpus, tmp_path / "corpus.sam")
    proposer = make_proposer(corpus=str(tmp_path / "corpus.sam"), min_extra_match_len=2)
    proposer._runner.add("a", [3, 4, 5])
    assert proposer._runner.step(proposer, ["a"], {"a": [6]})["a"] == [7, 8, 9]


def test_goodput_verifies_what_pays_and_learns_what_steps_take():
    proposer = make_proposer(policy="goodput")
    runner = proposer._runner
    runner.add("a", [1, 2, 3, 1, 2])
    runner.step(proposer, ["a"], {"a": [3]})
    assert runner.step(proposer, ["a"], {"a": [1]})["a"], "the guess of step costs lets one request draft"
    assert proposer.switch_on and proposer.drafted > 0
    proposer.policy.use_table(linear(0.001, 0.0, 1.0))
    assert runner.step(proposer, ["a"], {"a": [2, 3, 1]}) == {"a": []}
    assert not proposer.switch_on and proposer.counters["draft_errors"] == 0
    assert proposer.counters["skipped_steps"] == 1


def test_a_table_of_another_engine_leaves_the_threshold(tmp_path, monkeypatch):
    path, warnings = tmp_path / "cost.json", []
    # Not caplog: libraries imported by other tests switch loggers off that were there before them.
    monkeypatch.setattr("sam.vllm.warmup_cost.logger.warning", lambda text, *values: warnings.append(text % values))
    linear(1.0, 0.0, 0.1, fingerprint={"device": "A3"}).save(path)
    monkeypatch.setattr("sam.vllm.warmup_cost.fingerprint", lambda config: {"device": "cpu"})
    proposer = make_proposer(policy="goodput", step_cost=str(path))
    assert isinstance(proposer.policy, Threshold)
    assert len(warnings) == 1 and "is of device=A3, this engine has device=cpu" in warnings[0]
    monkeypatch.setattr("sam.vllm.warmup_cost.fingerprint", lambda config: {"device": "A3"})
    assert make_proposer(policy="goodput", step_cost=str(path)).policy.has_table


def test_no_drafts_while_a_router_is_about_to_fill_the_batch_and_drafts_when_nobody_comes():
    proposer = make_proposer(policy="threshold", batch_size_threshold=4)
    runner = proposer._runner
    runner.drafter, runner._update_states = proposer, lambda scheduled: None
    note_waiting(runner)

    def comes(**extra):
        new = [SimpleNamespace(sampling_params=SimpleNamespace(extra_args=said)) for said in ({WAITING: 3}, extra)]
        runner._update_states(SimpleNamespace(scheduled_new_reqs=new))

    for name in "abcdefgh":
        runner.add(name, [1, 2, 1, 2])

    def drafts(batch):
        return sum(map(len, runner.step(proposer, batch, dict.fromkeys(batch, [1])).values()))

    assert drafts("abcd") > 0, "nothing has been told: as with verl's balancer"
    comes(**{WAITING: 9})
    assert drafts("abcdefgh") == drafts("abcd") == 0
    assert [drafts("abcd") > 0 for _ in range(PATIENCE_STEPS)] == [False] * (PATIENCE_STEPS - 1) + [True]
    comes(**{WAITING: 9})
    runner._update_states(SimpleNamespace(scheduled_new_reqs=[]))
    assert drafts("abcd") == 0
    comes()
    assert drafts("abcd") > 0
    assert proposer.counters["awaited_steps"] == PATIENCE_STEPS + 1 and proposer.counters["draft_errors"] == 0
