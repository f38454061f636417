"""The proposer follows requests by id through every change of the batch, and never fails a rollout."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.policy import StepState
from sam.step_cost import linear
from sam.switch import Threshold, make_policy
from sam.vllm.proposer import MOST_BEHIND, SamProposer

LENGTH = 64


class Runner:
    """What a proposer reads of vLLM's model runner: the batch's rows, and which requests exist."""

    def __init__(self):
        self.requests, self.texts = {}, {}
        self.input_batch = SimpleNamespace(req_ids=[], num_prompt_tokens=np.zeros(8, np.int32))

    def add(self, name, prompt):
        self.requests[name] = SimpleNamespace(num_prompt_tokens=len(prompt), output_token_ids=[])
        self.texts[name] = list(prompt)

    def step(self, proposer, batch, new):
        """One engine step with `batch` as rows, in which each request's `new` tokens came out."""
        tokens = np.zeros((8, LENGTH), np.int32)
        counts = np.zeros(8, np.int32)
        self.input_batch.req_ids = list(batch)
        for row, name in enumerate(batch):
            self.texts[name] += new.get(name, [])
            self.requests[name].output_token_ids += new.get(name, [])
            text = self.texts[name]
            tokens[row, : len(text)], counts[row] = text, len(text)
            self.input_batch.num_prompt_tokens[row] = self.requests[name].num_prompt_tokens
        drafts = proposer.propose([new.get(name, []) for name in batch], counts, tokens)
        return dict(zip(batch, drafts, strict=True))


def make_proposer(**settings):
    config = SimpleNamespace(
        additional_config={"speculation": {"policy": "always", **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=LENGTH),
    )
    made = SamProposer(config)
    made.bind(Runner())
    return made


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
    assert proposer.counters["followed"] == 2
    runner.texts["a"] += [4, 1]  # as when a step's tokens were not shown to the proposer
    assert runner.step(proposer, ["b", "a"], {"a": [2], "b": [6]})["a"] == [3, 4, 1]
    assert proposer.drafter.num_tokens("a") == len(runner.texts["a"])
    assert proposer.counters["followed"] == 2 and proposer.counters["faults"] == 0


def test_finished_and_aborted_requests_are_released_and_still_help_their_siblings(proposer):
    runner = proposer._runner
    for name in "ab":
        runner.add(name, [1, 2])
    runner.step(proposer, ["a", "b"], {"a": [3, 4, 5], "b": [6]})
    del runner.requests["a"], runner.requests["b"]
    runner.add("c", [1, 2])
    drafts = runner.step(proposer, ["c"], {"c": [3]})
    assert set(proposer._followed) == {"c"} and "a" not in proposer.drafter
    assert drafts["c"] == [4, 5]


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


def test_fault_is_counted_and_the_step_goes_on(proposer, monkeypatch):
    runner, said = proposer._runner, []
    monkeypatch.setattr("sam.vllm.proposer.logger.exception", said.append)
    runner.add("a", [1, 2, 1])
    proposer.drafter.step = None
    for _ in range(3):
        assert runner.step(proposer, ["a"], {"a": [2]}) == {"a": []}
    assert proposer.counters["faults"] == 3
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
    assert (proposer.counters["refused"], proposer.counters["faults"]) == (1, 0)
    del runner.requests["long"]
    runner.step(proposer, ["short"], {"short": [2]})
    assert not proposer._refused


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
    from sam.automaton import SuffixAutomaton

    corpus = SuffixAutomaton(1 << 20)
    corpus.add(np.arange(30))
    corpus.save(tmp_path / "corpus.sam")
    proposer = make_proposer(corpus=str(tmp_path / "corpus.sam"), corpus_bias=2)
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
    assert not proposer.switch_on and proposer.counters["faults"] == 0
    assert proposer.counters["off_steps"] == 1


def test_a_step_is_shown_to_the_policy_only_if_it_is_the_one_that_was_planned():
    proposer, seen = make_proposer(), []
    proposer.policy.observe = lambda state, drafted, accepted, ms: seen.append((state.running, drafted, accepted))
    runner = proposer._runner
    runner.add("a", [1, 2, 1, 2])
    runner.step(proposer, ["a"], {"a": [1]})  # its prompt's step
    drafted = len(runner.step(proposer, ["a"], {"a": [2, 1]})["a"])
    assert seen == [(1, 3, 1)]
    runner.add("b", [5])
    runner.step(proposer, ["a", "b"], {"a": [2], "b": [6]})  # another one has come
    runner.step(proposer, ["a", "b"], {"a": [1, 2], "b": []})
    assert seen == [(1, 3, 1)] and drafted == 3


def test_a_table_of_another_engine_leaves_the_threshold(tmp_path, monkeypatch):
    path, warnings = tmp_path / "cost.json", []
    # Not caplog: libraries imported by other tests switch loggers off that were there before them.
    monkeypatch.setattr("sam.vllm.step_cost.logger.warning", lambda text, *values: warnings.append(text % values))
    linear(1.0, 0.0, 0.1, fingerprint={"device": "A3"}).save(path)
    monkeypatch.setattr("sam.vllm.step_cost.fingerprint", lambda config: {"device": "cpu"})
    proposer = make_proposer(policy="goodput", step_cost=str(path))
    assert isinstance(proposer.policy, Threshold)
    assert len(warnings) == 1 and "is of device=A3, this engine has device=cpu" in warnings[0]
    monkeypatch.setattr("sam.vllm.step_cost.fingerprint", lambda config: {"device": "A3"})
    assert make_proposer(policy="goodput", step_cost=str(path)).policy.has_table


def test_rows_of_other_ranks_are_what_vllm_agreed_on():
    from sam.vllm.data_parallel import follow_ranks

    across = SimpleNamespace(tolist=lambda: [5, 40, 12])
    parallel = SimpleNamespace(data_parallel_size=3, data_parallel_rank=1)
    runner = SimpleNamespace(vllm_config=SimpleNamespace(parallel_config=parallel))
    runner._determine_batch_execution_and_padding = lambda rows: (0, 1, 2, across, 4)
    follow_ranks(runner)
    follow_ranks(runner)
    assert runner._determine_batch_execution_and_padding(7) == (0, 1, 2, across, 4)
    assert runner.sam_rows_elsewhere == 12
    for unknown in ((0, 1, 2, None, 4), (0, 1)):
        other = SimpleNamespace(vllm_config=runner.vllm_config, _determine_batch_execution_and_padding=lambda: unknown)  # noqa: B023
        follow_ranks(other)
        assert other._determine_batch_execution_and_padding() == unknown and other.sam_rows_elsewhere == 0
    parallel.data_parallel_size = 1
    alone = SimpleNamespace(vllm_config=runner.vllm_config)
    follow_ranks(alone)
    assert not hasattr(alone, "sam_rows_elsewhere")


@pytest.mark.parametrize(
    "across, tokens, rows_elsewhere",
    [
        ([24, 24, 24], 24, 0),  # padded to this rank's own, or nobody has said anything
        ([24, 24, 24], 18, 0),  # 20 with sequence parallelism, and then the graph of 24: its own
        ([36, 36, 36], 33, 0),  # the same without a graph so large
        ([24, 24, 24], 13, 24),  # its own are 16: another one has 24
        ([48, 48, 48], 33, 48),  # no graph is so large
        ([5, 24, 12], 24, 12),
        ([5, 24, 40], 24, 40),
    ],
)
def test_a_rank_does_not_take_its_own_rows_for_those_of_others(across, tokens, rows_elsewhere):
    from sam.vllm.data_parallel import follow_ranks

    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=3, data_parallel_rank=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 16, 24, 32]),
    )
    runner = SimpleNamespace(vllm_config=config, _pad_for_sequence_parallelism=lambda rows: -(-rows // 4) * 4)
    agreed = SimpleNamespace(tolist=lambda: across)
    runner._determine_batch_execution_and_padding = lambda num_tokens: (0, 1, 2, agreed, 4)
    follow_ranks(runner)
    runner._determine_batch_execution_and_padding(num_tokens=tokens)
    assert runner.sam_rows_elsewhere == rows_elsewhere


def test_a_step_is_planned_by_the_rows_before_it_and_learnt_from_by_its_own():
    proposer, planned, seen = make_proposer(), [], []
    plan = proposer.policy.plan
    proposer.policy.plan = lambda state: (planned.append(state.rows_elsewhere), plan(state))[1]
    proposer.policy.observe = lambda state, drafted, accepted, ms: seen.append(state.rows_elsewhere)
    runner = proposer._runner
    runner.add("a", [1, 2, 1, 2])
    for rows, tokens in ((7, [1]), (11, [2, 1]), (5, [2, 1])):
        runner.sam_rows_elsewhere = rows
        runner.step(proposer, ["a"], {"a": tokens})
    assert planned == [7, 11, 5] and seen == [11, 5]


def test_without_drafts_the_drafter_is_called_now_and_then_and_misses_nothing():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, appended = proposer._runner, []
    append = proposer.drafter.append
    proposer.drafter.append = lambda *arguments: (appended.append(len(arguments[1])), append(*arguments))
    runner.add("a", [1, 2])
    runner.add("c", [1, 2])
    for token in range(MOST_BEHIND + 5):
        new = [3 + token % 3]
        assert runner.step(proposer, ["a", "c"], {"a": new, "c": new}) == {"a": [], "c": []}
    assert appended == [2 * MOST_BEHIND] and proposer.counters["off_steps"] == MOST_BEHIND + 5
    finished = runner.texts["a"]
    runner.requests.clear()
    runner.add("b", [1, 2])
    assert runner.step(proposer, ["b"], {"b": [3]})["b"] == finished[3:6]
    assert appended[1:] == [5, 5], "what the finished requests had written since"
    assert set(proposer._followed) == {"b"} and proposer.counters["faults"] == 0


def test_a_policy_is_not_asked_while_its_answer_holds_but_at_once_when_the_batch_changes():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, asked = proposer._runner, []
    plan = proposer.policy.plan
    proposer.policy.plan = lambda state: (asked.append(state.steps), plan(state))[1]
    for name in "abc":
        runner.add(name, [1, 2])
    for _ in range(9):
        runner.step(proposer, ["a", "b", "c"], {"a": [3], "b": [3], "c": [3]})
    assert asked == [1]
    runner.step(proposer, ["a", "b"], {"a": [3], "b": [3]})
    assert asked == [1, 9]
    runner.step(proposer, ["a"], {"a": [3]})
    assert asked == [1, 9, 1] and runner.step(proposer, ["a"], {"a": [3]})["a"] and asked == [1, 9, 1, 1]
    assert proposer.counters["off_steps"] == 10


def test_goodput_holds_for_its_cool_down_and_counts_the_steps_in_which_nobody_asked():
    asked_in_each, held = make_policy("goodput", 3, 0), make_policy("goodput", 3, 0)
    for policy in (asked_in_each, held):
        policy.plan(StepState(4))
        policy._cool_down = 20
    while asked_in_each.plan(StepState(4)).budget == 0:
        pass
    steps, asked = 1, 0
    while (answer := held.plan(StepState(4, steps=steps))).budget == 0:
        steps, asked = 1 + answer.hold, asked + 1
    assert held.counters == asked_in_each.counters == {"cool_down_steps": 20}
    assert asked == 3, "in the first step, after seven and after seven more"
