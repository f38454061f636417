"""The asynchronous proposer without an engine: counts, drafts and tokens that arrive late."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
import torch

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
