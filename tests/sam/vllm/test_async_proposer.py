"""The asynchronous proposer without an engine: counts, drafts and tokens that arrive late."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.vllm import async_hooks
from sam.vllm.tracked_requests import MAX_STEPS_BEHIND
from tests.sam.vllm.model_runner import LENGTH

ROWS = 4
ALONE = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "distributed_executor_backend": "mp",
}


@dataclass
class Cached:
    req_ids: list
    num_computed_tokens: list
    num_output_tokens: list
    resumed_req_ids: set = field(default_factory=set)


def make(requests, rows=ROWS, **parallel):
    """A proposer bound to a batch of `requests`: prompt and output of each by name."""
    from sam.vllm.async_proposer import AsyncSamProposer
    from sam.vllm.tracked_requests import TrackedRequests

    config = SimpleNamespace(
        additional_config={"speculation": {"policy": "always"}},
        speculative_config=SimpleNamespace(num_speculative_tokens=3),
        model_config=SimpleNamespace(max_model_len=LENGTH),
        parallel_config=SimpleNamespace(**ALONE | parallel),
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
    )
    proposer = AsyncSamProposer(config, "cpu")
    batch = SimpleNamespace(
        num_reqs=len(requests),
        req_ids=list(requests),
        req_id_to_index={name: row for row, name in enumerate(requests)},
        num_prompt_tokens=np.array([len(prompt) for prompt, _ in requests.values()]),
        num_tokens_no_spec=np.array([len(prompt) + len(output) for prompt, output in requests.values()], np.int32),
        token_ids_cpu=np.full((rows, LENGTH), -7, np.int32),
        is_token_ids=np.zeros((rows, LENGTH), bool),
        prev_sampled_token_ids="on the device",
    )
    states = {}
    for row, (name, (prompt, output)) in enumerate(requests.items()):
        states[name] = SimpleNamespace(
            prompt_token_ids=prompt, num_prompt_tokens=len(prompt), output_token_ids=list(output), prev_num_draft_len=3,
            sampling_params=None,
        )  # fmt: skip
        batch.token_ids_cpu[row, : len(prompt) + len(output)] = prompt + output
    mask = SimpleNamespace(np=np.zeros(rows, bool))
    proposer._runner = SimpleNamespace(input_batch=batch, requests=states, discard_request_mask=mask)
    proposer.tracked = TrackedRequests(proposer._runner, proposer.drafter, None, proposer.counters)
    return proposer


def output_of(sampled, arrived=True):
    """What vLLM returns for a step in which `sampled` (rows of one length, filled up with -1) came out."""
    event = SimpleNamespace(waits=0, query=lambda: arrived)
    event.synchronize = lambda: setattr(event, "waits", event.waits + 1)
    return SimpleNamespace(sampled_token_ids_cpu=torch.tensor(sampled), async_copy_ready_event=event)


def scheduled(placeholders, cached):
    tokens = {name: 1 + len(slots) for name, slots in placeholders.items()}
    return SimpleNamespace(
        scheduled_cached_reqs=cached,
        scheduled_spec_decode_tokens=placeholders,
        num_scheduled_tokens=tokens,
        total_num_scheduled_tokens=sum(tokens.values()),
    )


def test_placeholders_become_drafts_or_go():
    proposer = make({"a": ([1, 2], [3]), "b": ([4], [5])})
    proposer._drafts = {"a": [7, 8, 9], "b": [6]}
    # `c` was not in the last step, so that vLLM itself would verify its placeholders.
    step = scheduled({"a": [-1, -1], "b": [-1] * 3, "c": [-1] * 3}, Cached(["a", "b", "c"], [3, 2, 9], [1, 1, 4]))
    proposer.before_step(step)
    assert step.scheduled_spec_decode_tokens == proposer.verifying == {"a": [7, 8], "b": [6]}
    assert step.num_scheduled_tokens == {"a": 3, "b": 2, "c": 1} and step.total_num_scheduled_tokens == 6
    assert proposer.last.drafted == 3
    taken = proposer.take_draft_token_ids()
    assert (taken.req_ids, taken.draft_token_ids) == (["a", "b"], [[7, 8], [6]])


def test_counts_are_true_before_vllm_reads_them():
    proposer = make({"a": ([1, 2], [3, 4]), "b": ([4], [5, 5, 5, 5])})
    proposer.before_step(scheduled({"a": [-1] * 3, "b": [-1] * 3}, Cached([], [], [])))
    # The scheduler counts 1 + 3 tokens for each; of `a` one came, of `b` all. `c` was resumed with what it has.
    cached = Cached(["a", "b", "c"], [6, 4, 9], [5, 4, 2], {"c"})
    step = scheduled({}, cached)
    proposer.before_step(step)
    assert step.scheduled_cached_reqs.num_computed_tokens == [3, 4, 9]
    assert step.scheduled_cached_reqs.num_output_tokens == [2, 4, 2]
    assert cached.num_computed_tokens == [6, 4, 9], "the scheduler's own"
    assert [state.prev_num_draft_len for state in proposer._runner.requests.values()] == [0, 0]


def test_a_step_with_drafts_leaves_vllm_as_a_synchronous_one():
    proposer = make({"a": ([1, 2], [1, -1]), "b": ([4, 5], [4, -1])})
    batch, output = proposer._runner.input_batch, output_of([[2, 1, 2], [5, -1, -1]])
    proposer.after_step(output)
    assert output.async_copy_ready_event.waits == 0 and proposer.is_awaiting, "vLLM schedules the next step meanwhile"
    proposer.read_awaited()
    assert output.async_copy_ready_event.waits == 1 and proposer.counters["waited_steps"] == 1
    states = proposer._runner.requests
    assert states["a"].output_token_ids == [1, 2, 1, 2] and states["b"].output_token_ids == [4, 5]
    assert batch.num_tokens_no_spec.tolist() == [6, 4]
    assert batch.token_ids_cpu[0, :6].tolist() == [1, 2, 1, 2, 1, 2]
    assert proposer.accepted == {"a": [2, 1, 2], "b": [5]}
    assert proposer._drafts["a"] == [1, 2, 1] and batch.prev_sampled_token_ids is None


def test_tokens_that_arrive_late_wait_for_nobody_and_nobody_waits_for_them():
    proposer = make({"a": ([1, 2, 1], [-1]), "b": ([4, 5, 4], [])})
    proposer._runner.discard_request_mask.np[1] = True  # still in its prompt
    late = output_of([[2], [0]], arrived=False)
    proposer.after_step(late)
    assert late.async_copy_ready_event.waits == 0 and proposer.counters["late_steps"] == 1
    assert proposer.wants_drafts and proposer._drafts == {}
    assert proposer._runner.input_batch.prev_sampled_token_ids == "on the device"
    late.async_copy_ready_event.query = lambda: True
    state, batch = proposer._runner.requests["a"], proposer._runner.input_batch
    state.output_token_ids.append(-1)
    batch.num_tokens_no_spec[0] += 1
    proposer.after_step(output_of([[1], [0]]))
    proposer.read_awaited()
    assert state.output_token_ids == [2, 1] and batch.token_ids_cpu[0, :5].tolist() == [1, 2, 1, 2, 1]
    assert proposer._drafts["a"] == [2, 1, 2] and "b" not in proposer._drafts
    assert proposer._runner.requests["b"].output_token_ids == [] and proposer.counters["draft_errors"] == 0


def test_tokens_of_a_preempted_request_are_the_schedulers():
    proposer = make({"a": ([1], [2, -1])})
    proposer.policy.plan = lambda state: SimpleNamespace(budget=0, valid_for_steps=0)
    proposer.after_step(output_of([[9]], arrived=False))
    proposer._runner.requests["a"].output_token_ids = [2, 3]
    proposer._pending[0].copied.query = lambda: True
    proposer._take_arrived()
    assert proposer._runner.requests["a"].output_token_ids == [2, 3] and not proposer._pending


@pytest.mark.parametrize(
    "ranks",
    [
        {"pipeline_parallel_size": 2},
        {"prefill_context_parallel_size": 2},
        {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"},
    ],
)
def test_ranks_that_could_not_agree_are_refused(ranks):
    name, value = list(ranks.items())[-1]
    with pytest.raises(ValueError, match=f"with {name}={value}: .*: set speculation.async_scheduling=off"):
        make({}, **ranks)
    make({}, tensor_parallel_size=2)


def test_the_scheduler_leaves_room_only_while_drafts_are_to_come():
    class Scheduler:
        def __init__(self):
            self._spec_token_placeholders, self.requests = [-1] * 3, {}
            self.running = self.requests.values()

        def add(self, name, is_prefill_chunk=False, use_structured_output=False):
            self.requests[name] = SimpleNamespace(
                is_prefill_chunk=is_prefill_chunk, use_structured_output=use_structured_output, spec_token_ids=[-1] * 3
            )

        def update_from_output(self, scheduler_output, model_runner_output):
            return "outputs"

        def _update_after_schedule(self, scheduler_output):
            for name in scheduler_output.num_scheduled_tokens:
                self.requests[name].spec_token_ids = self._spec_token_placeholders

    for _ in range(2):
        async_hooks.schedule_wanted_drafts(Scheduler)
    scheduler = Scheduler()
    for name, what in {"a": {}, "prompt": {"is_prefill_chunk": True}, "json": {"use_structured_output": True}}.items():
        scheduler.add(name, **what)
    room = lambda: {name: len(request.spec_token_ids) for name, request in scheduler.requests.items()}  # noqa: E731
    assert scheduler.update_from_output(None, SimpleNamespace()) == "outputs"
    assert scheduler._spec_token_placeholders == [-1] * 3, "an engine with another drafter"
    scheduler.update_from_output(None, SimpleNamespace(sam_placeholders=0))
    assert room()["a"] == 0 and scheduler._spec_token_placeholders == []
    scheduler.update_from_output(None, SimpleNamespace(sam_placeholders=3))
    assert room()["a"] == 3
    step = SimpleNamespace(num_scheduled_tokens={"a": 4, "json": 1}, has_structured_output_requests=True)
    scheduler._update_after_schedule(step)
    assert room() == {"a": 3, "prompt": 3, "json": 0}


def test_what_is_kept_of_late_steps_is_bounded():
    proposer = make({"a": ([1], [-1])})
    proposer.policy.plan = None
    state, batch = proposer._runner.requests["a"], proposer._runner.input_batch
    for step in range(1, 70):
        proposer.after_step(output_of([[9]], arrived=False))
        state.output_token_ids.append(-1)
        batch.num_tokens_no_spec[0] += 1
        assert len(proposer._pending) == min(step, 2 * MAX_STEPS_BEHIND)
    assert proposer.counters["draft_errors"] == 69 and proposer.tracked.untracked == {"a"}
