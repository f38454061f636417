"""The sampler where every temperature is 1, without an engine."""

from contextlib import contextmanager

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sam.vllm import exact_sampler
from tests.sam.vllm.test_exact_sampler_rows import VOCABULARY, runner


def test_logits_are_not_divided_where_every_temperature_is_one():
    """Tokens and log-probabilities are those of the division, and the batch's temperatures are looked at once."""
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    looked = []

    def sample(has_host, temperatures):
        sampler = exact_sampler.ExactSampler(runner(4, "processed_logprobs"))
        batch = sampler.runner.input_batch
        batch.sampling_metadata.temperature = torch.tensor(temperatures)
        if has_host:
            batch.temperature_cpu = np.array([*temperatures, 0.3]).view(Looked)  # of a row that is not in use
        with count_divisions() as divisions:
            outputs = [sampler(logits.clone(), None) for _ in range(3)]
        assert all(torch.equal(a.sampled_token_ids, outputs[0].sampled_token_ids) for a in outputs)
        return outputs[0].sampled_token_ids, outputs[0].logprobs_tensors.logprobs, divisions.count

    class Looked(np.ndarray):
        def __getitem__(self, index):
            looked.append(index)
            return np.asarray(super().__getitem__(index))

    tokens, logprobs, divisions = sample(True, [1.0] * 4)
    assert (divisions, len(looked)) == (0, 1)
    divided = sample(False, [1.0] * 4)
    assert divided[2] == 3 and torch.equal(tokens, divided[0]) and torch.equal(logprobs, divided[1])
    assert sample(True, [1.0, 1.0, 0.7, 1.0])[2] == 3


def test_raw_log_probabilities_are_of_logits_that_top_k_has_not_touched():
    sampler = exact_sampler.ExactSampler(runner(4, "raw_logprobs"))
    batch = sampler.runner.input_batch
    batch.sampling_metadata.temperature, batch.temperature_cpu = torch.ones(4), np.ones(4)
    logits = torch.randn(4, VOCABULARY, generator=torch.Generator().manual_seed(0))
    plain = sampler(logits.clone(), None).logprobs_tensors
    batch.sampling_metadata.top_k = torch.full((4,), 2)
    constrained = sampler(logits.clone(), None).logprobs_tensors
    assert torch.equal(plain.logprobs[:, 1:], constrained.logprobs[:, 1:])  # of the most likely tokens


@contextmanager
def count_divisions():
    class Counting(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            self.count += "div" in function.name()
            return function(*arguments, **(keywords or {}))

    with Counting() as counting:
        yield counting
