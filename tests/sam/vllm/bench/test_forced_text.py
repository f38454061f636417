"""Forced text on runners of numpy and torch, without vLLM: scheduled asynchronously, by vLLM's second one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sam.vllm.bench.engine import check_length
from sam.vllm.bench.forced_text import ForcedText, sampling_arguments

RESPONSES = [[10, 11, 12], [20], [30, 31]]


def sampling(number):
    """SamplingParams of a request that emits response `number`; None for a request of its own text."""
    return SimpleNamespace(
        extra_args=None if number is None else sampling_arguments(number, RESPONSES[number])["extra_args"]
    )


def test_drafts_of_stock_stand_up_to_the_first_that_is_not_the_recordings():
    """A right and a wrong draft; a request in its prompt; more drafts than text; a request of its own text."""
    of, names = [(0, 5), (1, 3), (2, 2), (None, 4)], ["a", "b", "c", "d"]
    runner = SimpleNamespace(
        speculative_config="ngram_gpu",
        input_batch=SimpleNamespace(req_ids=names),
        requests={
            name: SimpleNamespace(sampling_params=sampling(number), num_prompt_tokens=prompt)
            for name, (number, prompt) in zip(names, of, strict=True)
        },
        # The tokens scheduled: one and two drafts, a prompt of three, one and three drafts, one.
        positions=torch.tensor([5, 6, 7, 0, 1, 2, 1, 2, 3, 4, 9]),
        query_start_loc=SimpleNamespace(gpu=torch.tensor([0, 3, 6, 10, 11], dtype=torch.int32)),
    )
    drafts = SimpleNamespace(num_draft_tokens=[2, 0, 3, 0], draft_token_ids=torch.tensor([11, 99, 30, 31, 77]))
    sampled = torch.tensor([[1, 2, -1, -1], [7, -1, -1, -1], [1, -1, -1, -1], [5, -1, -1, -1]], dtype=torch.int32)
    runner._sample = lambda logits, _: SimpleNamespace(sampled_token_ids=sampled)
    ForcedText.attach(runner).set_responses(RESPONSES)
    tokens = runner._sample(None, drafts).sampled_token_ids
    assert tokens.tolist() == [[11, 12, -1, -1], [20, -1, -1, -1], [30, 31, -1, -1], [5, -1, -1, -1]]


def test_the_second_model_runner():
    counted, output = [], SimpleNamespace(sampled_token_ids=torch.full((3, 1), 99))
    runner = SimpleNamespace(
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([4, 6, 5]))),
        add_requests=lambda scheduled: counted.append(len(scheduled.scheduled_new_reqs)),
        sample=lambda hidden, batch, grammar: (output, "sampled", "rejected"),
    )
    ForcedText.attach(runner).set_responses(RESPONSES)
    new = [SimpleNamespace(req_id=name, sampling_params=sampling(n)) for n, name in enumerate("abc")]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=[]))
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=["c"]))
    batch = SimpleNamespace(req_ids=["b", "a", "c"], idx_mapping_np=np.array([2, 0, 1]))
    batch.num_computed_tokens_np = np.array([0, 5, 0])
    batch.num_scheduled_tokens = np.array([5, 1, 4])  # the last one's prompt comes in pieces, its token is dropped
    output, *counts = runner.sample(None, batch, None)
    assert output.sampled_token_ids.tolist() == [[20], [12], [99]] and counted == [3, 0]
    assert counts == ["sampled", "rejected"]


def test_a_text_that_the_engine_would_cut_is_refused():
    check_length(2, 16, 18)
    with pytest.raises(ValueError, match="2 tokens and a response of up to 16, more than the 10 that the engine takes"):
        check_length(2, 16, 10)
