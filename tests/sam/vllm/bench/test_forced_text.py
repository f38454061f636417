"""Forced text on vLLM's second model runner, made of numpy and torch."""

from types import SimpleNamespace

import numpy as np
import torch

from sam.vllm.bench.forced_text import ForcedText, sampling_arguments

RESPONSES = [[10, 11, 12], [20], [30, 31]]


def test_the_second_model_runner():
    counted, output = [], SimpleNamespace(sampled_token_ids=torch.full((3, 1), 99))
    runner = SimpleNamespace(
        req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([4, 6, 5]))),
        add_requests=lambda scheduled: counted.append(len(scheduled.scheduled_new_reqs)),
        sample=lambda hidden, batch, grammar: (output, "sampled", "rejected"),
    )
    ForcedText.attach(runner).set_responses(RESPONSES)
    told = [sampling_arguments(number, RESPONSES[number])["extra_args"] for number in range(3)]
    new = [
        SimpleNamespace(req_id=name, sampling_params=SimpleNamespace(extra_args=one))
        for name, one in zip("abc", told, strict=True)
    ]
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=new, finished_req_ids=[]))
    runner.add_requests(SimpleNamespace(scheduled_new_reqs=[], finished_req_ids=["c"]))
    batch = SimpleNamespace(req_ids=["b", "a", "c"], idx_mapping_np=np.array([2, 0, 1]))
    batch.num_computed_tokens_np = np.array([0, 5, 0])
    batch.num_scheduled_tokens = np.array([5, 1, 4])  # the last one's prompt comes in pieces, its token is dropped
    output, *counts = runner.sample(None, batch, None)
    assert output.sampled_token_ids.tolist() == [[20], [12], [99]] and counted == [3, 0]
    assert counts == ["sampled", "rejected"]
