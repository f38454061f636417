"""What the proposer makes of requests and hints, when it asks its policy, and what it keeps."""

from types import SimpleNamespace

import numpy as np
import pytest

from sam.vllm.hints import RequestHints
from sam.vllm.proposer import SamProposer
from sam.vllm.ranks import keep_other_ranks_tokens
from sam.vllm.tracked_requests import MAX_STEPS_BEHIND
from tests.sam.history.kept import kept

LENGTH = 64


class Runner:
    """What a proposer reads of vLLM's model runner: the batch's rows, and which requests exist."""

    def __init__(self, vllm_config=None):
        self.requests, self.texts = {}, {}
        self.vllm_config, self.input_batch = vllm_config, SimpleNamespace(req_ids=[])

    def add(self, name, prompt, sampling_params=None):
        self.requests[name] = SimpleNamespace(
            prompt_token_ids=prompt, num_prompt_tokens=len(prompt), output_token_ids=[], sampling_params=sampling_params
        )
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
        drafts = proposer.propose([new.get(name, []) for name in batch], counts, tokens)
        return dict(zip(batch, drafts, strict=True))


def make_proposer(**settings):
    config = SimpleNamespace(
        additional_config={"speculation": {"policy": "always", **settings}},
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=LENGTH, model="a model"),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, distributed_executor_backend="uni"),
        scheduler_config=SimpleNamespace(max_num_seqs=8),
    )
    made = SamProposer(config)
    made.runner = Runner(config)
    made.bind(made.runner)
    return made


@pytest.fixture
def proposer():
    return make_proposer()


def hints(**told):
    return SimpleNamespace(extra_args=RequestHints(prompt_tokens=2, **told).extra_args())


def test_a_later_turn_and_a_part_of_a_response_are_text_of_the_group_of_the_first_prompt(proposer):
    """What a tool answered, 8 and 9, is drafted for a sibling; the first turn is there once."""
    runner = proposer.runner
    runner.add("a", [1, 2])
    runner.step(proposer, ["a"], {"a": [3, 4]})
    del runner.requests["a"]
    runner.add("next turn", [1, 2, 3, 4, 8, 9], hints(turn=2))
    runner.add("part", [1, 2, 3], hints(response_limit=20))
    assert runner.step(proposer, ["next turn", "part"], {"next turn": [5], "part": [4]})["part"] == [8, 9, 5]
    assert len(proposer.drafter.groups) == 1
    assert proposer.drafter.store.groups["num_tokens"].sum() == 2 + 2 + 3 + 1


def test_request_that_cannot_be_followed_gets_no_drafts_and_the_others_do(proposer, monkeypatch):
    runner, start = proposer.runner, proposer.drafter.start

    def start_short(request_id, prompt, *others):
        if len(prompt) > 10:
            raise ValueError("too long")
        start(request_id, prompt, *others)

    monkeypatch.setattr(proposer.drafter, "start", start_short)
    runner.add("long", [1, 2] * 10)
    runner.add("short", [1, 2, 1])
    for _ in range(3):
        drafts = runner.step(proposer, ["long", "short"], {"long": [1], "short": [2, 1]})
        assert drafts["long"] == [] and drafts["short"]
    assert (proposer.counters["untracked_requests"], proposer.counters["draft_errors"]) == (1, 0)


def test_without_drafts_the_drafter_is_called_now_and_then_and_misses_nothing():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, appended, append = proposer.runner, [], proposer.drafter.append
    proposer.drafter.append = lambda *arguments: (appended.append(len(arguments[1])), append(*arguments))
    runner.add("a", [1, 2])
    runner.add("c", [1, 2])
    for token in range(MAX_STEPS_BEHIND + 5):
        new = [3 + token % 3]
        assert runner.step(proposer, ["a", "c"], {"a": new, "c": new}) == {"a": [], "c": []}
    assert appended == [2 * MAX_STEPS_BEHIND] and proposer.counters["skipped_steps"] == MAX_STEPS_BEHIND + 5
    finished = runner.texts["a"]
    runner.requests.clear()
    runner.add("b", [1, 2])
    assert runner.step(proposer, ["b"], {"b": [3]})["b"] == finished[3:6]
    assert appended[1:] == [5, 5, 1], "what the finished requests had written since, and the new one"


def test_a_policy_is_not_asked_while_its_answer_holds_but_at_once_when_the_batch_changes():
    proposer = make_proposer(policy="threshold", batch_size_threshold=1)
    runner, asked, plan = proposer.runner, [], proposer.policy.plan
    proposer.policy.plan = lambda state: (asked.append(state.steps_since_plan), plan(state))[1]
    for name in "abc":
        runner.add(name, [1, 2])
    for batch, times, expected in (("abc", 9, [1]), ("ab", 1, [1, 9]), ("a", 2, [1, 9, 1, 1])):
        for _ in range(times):
            drafts = runner.step(proposer, batch, {name: [3] for name in batch})
        assert asked == expected
    assert drafts["a"] and proposer.counters["skipped_steps"] == 10


def test_a_step_is_shown_to_the_policy_only_if_it_is_the_one_that_was_planned(proposer):
    seen, runner = [], proposer.runner
    proposer.policy.observe = lambda state, drafted, accepted, ms: seen.append((state.running, drafted, accepted))
    runner.add("a", [1, 2, 1, 2])
    runner.step(proposer, ["a"], {"a": [1]})  # its prompt's step
    assert len(runner.step(proposer, ["a"], {"a": [2, 1]})["a"]) == 3
    assert seen == [(1, 3, 1)]
    runner.add("b", [5])
    runner.step(proposer, ["a", "b"], {"a": [2], "b": [6]})  # another one has come
    runner.step(proposer, ["a", "b"], {"a": [1, 2], "b": []})
    runner.add("c", [1, 2, 1, 2])
    runner.step(proposer, ["a", "c"], {"a": [1, 2], "c": [1]})  # one took the place of another
    assert seen == [(1, 3, 1)]
    runner.step(proposer, ["a", "c"], {"a": [1], "c": [2]})
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("across", "tokens", "largest"),
    [
        ([24, 24, 24], 18, 0),  # 20 with sequence parallelism, and then the graph of 24: its own
        ([24, 24, 24], 13, 24),  # its own are 16: another one has 24
        ([48, 48, 48], 33, 48),  # no graph is so large
        ([5, 24, 40], 24, 40),
        (None, 24, 0),  # the ranks agreed on nothing
    ],
)
def test_a_rank_does_not_take_its_own_rows_for_those_of_others(across, tokens, largest):
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=3, data_parallel_rank=1),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[8, 16, 24, 32]),
    )
    runner = SimpleNamespace(vllm_config=config, _pad_for_sequence_parallelism=lambda rows: -(-rows // 4) * 4)
    agreed = across and SimpleNamespace(tolist=lambda: across)
    runner._determine_batch_execution_and_padding = lambda num_tokens: (0, 1, 2, agreed, 4)
    keep_other_ranks_tokens(runner)
    assert runner._determine_batch_execution_and_padding(num_tokens=tokens) == (0, 1, 2, agreed, 4)
    assert runner.sam_max_num_tokens_other_dp_ranks == largest


@pytest.mark.parametrize(
    ("output", "limit", "written"),
    [
        ([4, 5, 6], 5, []),  # its response goes on: the next part begins with these tokens
        ([4, 5, 2], 5, [3, 4, 5, 2]),  # 2 ends a response
        ([4, 5], 5, [3, 4, 5]),  # aborted
        ([4, 5, 6], 4, [3, 4, 5, 6]),
        ([4, 5], None, []),  # interrupted: the client of verl's asynchronous trainers goes on with it
        ([4, 2], None, [3, 4, 2]),
    ],
)
def test_of_a_response_in_parts_the_whole_is_kept_once_at_the_weight_sync(tmp_path, output, limit, written):
    """A part of three tokens, after one that had the token 3; it has ended, and no step follows."""
    from vllm import SamplingParams

    proposer = make_proposer(scope="history", history_path=str(tmp_path))
    told = RequestHints(prompt_tokens=2, response_limit=limit).extra_args()
    proposer.runner.add("a", [1, 2, 3], SamplingParams(max_tokens=3, stop_token_ids=[2], extra_args=told))
    proposer.runner.step(proposer, ["a"], {"a": output})
    proposer.runner.requests.clear()
    proposer.weights_updated()
    proposer.tracked.history.stop()
    assert sum(kept(tmp_path, [1, 2]), []) == written and proposer.counters["draft_errors"] == 0
    assert proposer.counters["policy_version"] == 1
