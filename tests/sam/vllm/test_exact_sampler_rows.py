"""The sampler without an engine: the self-check, waits for the device."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from sam import verify
from sam.vllm import exact_sampler
from tests.sam.verify.cost import Operations


def test_the_self_check_sees_wrong_tokens(monkeypatch):
    exact_sampler.self_check("cpu")
    monkeypatch.setattr(verify, "sample_inverse_cdf", lambda logits, *_: logits.argmin(-1))
    with pytest.raises(RuntimeError, match="known logits gave"):
        exact_sampler.self_check("cpu")


@pytest.mark.parametrize("counts", [None, [3, 0, 2, 1]], ids=["plain", "with drafts"])
def test_the_host_waits_for_no_device(monkeypatch, counts):
    """On a device without values, where the host could not have waited for any; some requests are greedy."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    names, asked = list("abcd"), {"all_greedy": False, "all_random": False, "no_penalties": True, "max_num_logprobs": 3}
    asked |= {"temperature": torch.zeros(4, device="meta"), "logitsprocs": LogitsProcessors()}
    metadata = SamplingMetadata(**dict.fromkeys(field.name for field in fields(SamplingMetadata)) | asked)
    metadata.output_token_ids = [[] for _ in names]
    batch = SimpleNamespace(req_ids=names, generators={}, sampling_metadata=metadata)
    batch.update_async_output_token_ids = lambda: None
    request = SimpleNamespace(sampling_params=SimpleNamespace(seed=1), num_tokens=0)
    runner = SimpleNamespace(model_config=SimpleNamespace(seed=0), sampler=Sampler(), input_batch=batch)
    runner.requests = dict.fromkeys(names, request)
    step = counts and SimpleNamespace(
        num_draft_tokens=counts, draft_token_ids=torch.zeros(sum(counts), dtype=torch.int32, device="meta")
    )
    logits = torch.empty(4 + sum(counts or ()), 5000, device="meta")
    with Operations() as seen:
        output = exact_sampler.ExactSampler(runner)(logits, step)
    assert seen.waits == [] and output.sampled_token_ids.shape == (4, 4 if counts else 1)
