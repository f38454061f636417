"""The sampler without an engine: log-probabilities of drafted rows, the self-check, waits for the device."""

import types
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.sampler import Sampler

from sam import verify
from sam.vllm import exact_sampler, rejection_sampler
from tests.sam.verify.cost import Operations

VOCABULARY = 50


def runner(requests: int, mode: str = "raw_logprobs", temperature: float = 0.7) -> SimpleNamespace:
    *_, metadata, _ = rejection_sampler.known_step("cpu")
    metadata.temperature = torch.full((requests,), temperature)
    metadata.max_num_logprobs = 3
    names = [str(row) for row in range(requests)]
    return SimpleNamespace(
        device="cpu",
        speculative_config=SimpleNamespace(rejection_sample_method="standard"),
        model_config=SimpleNamespace(seed=0),
        sampler=Sampler(mode),
        input_batch=SimpleNamespace(
            req_ids=names, generators={}, sampling_metadata=metadata, update_async_output_token_ids=lambda: None
        ),
        requests={
            name: SimpleNamespace(sampling_params=SimpleNamespace(seed=row), num_tokens=0)
            for row, name in enumerate(names)
        },
    )


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_log_probabilities_of_drafted_rows_equal_those_of_plain_steps(mode):
    """One step with drafts against as many plain steps as it has positions, on the same logits: equal to the bit."""
    requests, k = 6, 3
    logits = 2 * torch.randn(requests, k + 1, VOCABULARY, generator=torch.Generator().manual_seed(0))
    plain = exact_sampler.ExactSampler(runner(requests, mode))
    steps = []
    for position in range(k + 1):
        for request in plain.runner.requests.values():
            request.num_tokens = position
        steps.append(plain(logits[:, position].clone(), None))
    wanted = torch.stack([step.sampled_token_ids[:, 0] for step in steps], 1)

    counts = [3, 0, 2, 3, 1, 3]
    wrong = [None, None, 1, 0, None, None]  # the draft position that is made to differ
    rows = [logits[row, : count + 1] for row, count in enumerate(counts)]
    drafts = [wanted[row, :count].clone() for row, count in enumerate(counts)]
    for row, position in enumerate(wrong):
        if position is not None:
            drafts[row][position] = (drafts[row][position] + 1) % VOCABULARY
    step = SimpleNamespace(num_draft_tokens=counts, draft_token_ids=torch.cat(drafts))
    output = exact_sampler.ExactSampler(runner(requests, mode))(torch.cat(rows), step)

    lengths = [count + 1 if position is None else position + 1 for count, position in zip(counts, wrong, strict=True)]
    width = max(counts) + 1
    for row, length in enumerate(lengths):
        assert output.sampled_token_ids[row].tolist() == wanted[row, :length].tolist() + [-1] * (width - length)
        for position in range(length):
            found, expected = output.logprobs_tensors, steps[position].logprobs_tensors
            assert torch.equal(found.logprobs[row * width + position], expected.logprobs[row])
            assert torch.equal(found.logprob_token_ids[row * width + position], expected.logprob_token_ids[row])
            assert found.selected_token_ranks[row * width + position] == expected.selected_token_ranks[row]


class Runner(SimpleNamespace):
    def sample_tokens(self):
        return self._sample(None, None)


class OtherRunner(SimpleNamespace):
    def sample_tokens(self):
        return self.sampler(None, None)


def call_sampler(sampler):
    checked = (OtherRunner if sampler == "another" else Runner)(**vars(runner(3)))
    checked._sample = exact_sampler.ExactSampler(checked)
    exact_sampler.self_check(checked)


def verify_drafts(sampler):
    """vLLM's rejection sampler, which looks its functions up in its module, or has bound them before."""
    module = types.ModuleType("module")
    module.rejection_sample = None
    rejection_sampler.install(module)
    function = verify.rejection_sample if sampler == "another" else module.rejection_sample

    def call(metadata, draft_probs, logits, sampling):
        rows = logits[metadata.target_logits_indices]
        bonus = logits[metadata.bonus_logits_indices].argmax(-1)[:, None]
        drafts = metadata.draft_token_ids, metadata.num_draft_tokens, metadata.max_spec_len
        tokens = function(*drafts, metadata.cu_num_draft_tokens, draft_probs, rows, bonus, sampling)
        return SimpleNamespace(sampled_token_ids=tokens)

    rejection_sampler.self_check(SimpleNamespace(device="cpu", rejection_sampler=call), module)


@pytest.mark.parametrize(
    ("check", "elsewhere"),
    [(call_sampler, "does not call _sample"), (verify_drafts, "does not call module.rejection_sample")],
)
def test_self_checks_see_a_runner_that_samples_elsewhere_and_wrong_tokens(check, elsewhere, monkeypatch):
    with pytest.raises(RuntimeError, match=elsewhere):
        check("another")
    check("ours")
    monkeypatch.setattr(verify, "sample_inverse_cdf", lambda logits, *_: logits.argmin(-1))
    monkeypatch.setattr(verify, "rejection_sample", lambda drafts, *_, **__: torch.zeros(3, 3, dtype=torch.int32))
    with pytest.raises(RuntimeError, match="known logits gave"):
        check("ours")


@pytest.mark.parametrize("mixed", [False, True], ids=["drawn", "greedy too"])
@pytest.mark.parametrize("counts", [None, [3, 0, 2, 1]], ids=["plain", "with drafts"])
def test_the_host_waits_for_no_device(monkeypatch, counts, mixed):
    """On a device without values, where the host could not have waited for any."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: self)
    made = runner(4)
    made.device = "meta"
    metadata = made.input_batch.sampling_metadata
    metadata.temperature, metadata.all_random = metadata.temperature.to("meta"), not mixed
    step = counts and SimpleNamespace(
        num_draft_tokens=counts, draft_token_ids=torch.zeros(sum(counts), dtype=torch.int32, device="meta")
    )
    sampler = exact_sampler.ExactSampler(made)
    logits = torch.empty(4 + sum(counts or ()), 5000, device="meta")
    with Operations() as seen:
        output = sampler(logits, step)
    assert seen.waits == [] and output.sampled_token_ids.shape == (4, 4 if counts else 1)


def test_a_wait_would_be_seen():
    values = torch.arange(4)
    with Operations() as seen:
        values.to("meta"), values[values > 1], values.sum().item()
    assert [name.split(".")[0] for name in seen.waits] == ["_to_copy", "index", "_local_scalar_dense"]
