"""Two tensor-parallel ranks of an asynchronous engine, without one: the second is given drafts and asks no clock."""

from collections import deque

import numpy as np
import pytest

from sam.switch.policy import Plan
from tests.sam.vllm.test_async_proposer import Cached, make, output_of, scheduled


class Group:
    """As vLLM's GroupCoordinator: what the first rank sends is what the second receives, in order."""

    def __init__(self, messages: deque, is_first: bool):
        self.messages, self.is_first, self.calls = messages, is_first, 0

    def broadcast_object(self, value):
        self.calls += 1
        if self.is_first:
            self.messages.append(value)
            return value
        return self.messages.popleft()


def two_ranks(requests):
    """A drafting proposer and one that follows it."""
    messages = deque()
    first, second = make(requests, tensor_parallel_size=2), make(requests, tensor_parallel_size=2)
    for proposer in (first, second):
        proposer.is_drafting_rank = proposer is first
        proposer._group = Group(messages, proposer is first)
    return first, second


def states_of(proposer):
    batch = proposer._runner.input_batch
    outputs = {name: list(state.output_token_ids) for name, state in proposer._runner.requests.items()}
    return outputs, batch.num_tokens_no_spec.tolist(), batch.token_ids_cpu.tolist(), batch.is_token_ids.tolist()


REQUESTS = {"a": ([1, 2], [1, -1]), "b": ([4, 5], [4, -1])}


def step_with_room():
    return scheduled({"a": [-1] * 3, "b": [-1] * 2}, Cached(["a", "b"], [6, 6], [5, 5]))


@pytest.mark.parametrize("sampled", [[[2], [5]], [[2, 1, 2], [5, -1, -1]]], ids=["no drafts yet", "drafts verified"])
@pytest.mark.parametrize("arrived", [True, False])
def test_all_ranks_verify_the_first_ones_drafts_from_the_same_tokens(sampled, arrived):
    first, second = two_ranks(REQUESTS)
    second.drafter.start("other text", np.arange(9, dtype=np.int32), 0)
    first.last.plan = Plan(3)
    outputs = [output_of(sampled), output_of(sampled, arrived)]
    steps = [step_with_room(), step_with_room()]
    for proposer, output in zip((first, second), outputs, strict=True):
        proposer._had_placeholders = True
        proposer.after_step(output)
    assert outputs[1].async_copy_ready_event.waits == 0 and second._drafts == {}
    for proposer, step in zip((first, second), steps, strict=True):
        proposer.before_step(step)
    assert first.verifying == second.verifying and first.verifying["a"]
    assert vars(steps[0]) == vars(steps[1])
    assert [output.async_copy_ready_event.waits for output in outputs] == [1, 1]
    assert first._group.calls == second._group.calls == 1
    assert states_of(first) == states_of(second)
    assert second._runner.input_batch.prev_sampled_token_ids is None
    assert second.counters["tracked_requests"] == 0 and second._pending == deque()


def test_a_rank_whose_copy_failed_takes_the_tokens_from_the_device():
    first, second = two_ranks(REQUESTS)
    output = output_of([[2], [5]])
    output.async_copy_ready_event.synchronize = None
    output._sampled_token_ids = output.sampled_token_ids_cpu
    first.last.plan = Plan(3)
    first.after_step(output_of([[2], [5]]))
    second.after_step(output)
    for proposer in (first, second):
        proposer.before_step(step_with_room())
    assert second.counters["draft_errors"] == 1 and states_of(first) == states_of(second)
