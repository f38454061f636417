"""What is changed of vLLM's model runner, with vLLM's own functions and no engine."""

from types import SimpleNamespace

import pytest
import torch

from sam.vllm.runner_hooks import fill_last_placeholder


def step(outputs, sampled, use_async_spec_decode=False):
    """A model runner whose last step sampled `sampled`; `outputs` are its requests', as penalties need them."""
    from vllm.v1.worker.gpu_input_batch import InputBatch

    names = [f"request {row}" for row in range(len(outputs))]
    batch = SimpleNamespace(
        req_ids=names,
        prev_req_id_to_index={name: row for row, name in enumerate(names)},
        sampled_token_ids_cpu=torch.tensor(sampled),
        async_copy_ready_event=SimpleNamespace(synchronize=lambda: None),
        sampling_metadata=SimpleNamespace(output_token_ids=outputs),
    )
    batch.update_async_output_token_ids = lambda: InputBatch.update_async_output_token_ids(batch)
    return SimpleNamespace(input_batch=batch, use_async_spec_decode=use_async_spec_decode)


def test_a_request_keeps_its_length_as_a_penalised_one_joins():
    outputs = [[7, -1, -1, -1], [-1], [4, 5], []]
    runner = step(outputs, [[9], [8], [6], [3]])
    runner.input_batch.update_async_output_token_ids()
    assert list(map(len, outputs)) == [2, 1, 2, 0], "the root cause, in vLLM"
    outputs = [[7, -1, -1, -1], [-1], [4, 5], []]
    runner = step(outputs, [[9], [8], [6], [3]])
    for _ in range(2):
        fill_last_placeholder(runner)
        assert outputs == [[7, -1, -1, 9], [8], [4, 5], []]


@pytest.mark.parametrize(("optimistic", "expected"), [(True, [7, 9]), (False, [7, -1, 9])])
def test_vllms_own_optimistic_counts_are_cut(optimistic, expected):
    outputs = [[7, -1, -1]]
    fill_last_placeholder(step(outputs, [[9, -1]], use_async_spec_decode=optimistic))
    assert outputs == [expected]


def test_without_penalties_nothing_is_read():
    runner = step([], [[9]])
    runner.input_batch.async_copy_ready_event = None
    fill_last_placeholder(runner)
