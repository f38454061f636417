"""Rejection sampling in vLLM's rejection sampler, for steps with drafts; what both samplers need."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from sam import verify
from sam.verify.exact import sent
from sam.vllm import patches


class RejectionVerification:
    """Replaces `rejection_sample` in vLLM's module, and counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *arguments, **keywords) -> torch.Tensor:
        self.calls += 1
        return verify.rejection_sample(*arguments, **keywords)


def install(module) -> None:
    """Put sam.verify's functions into a module that has vLLM's names; doing so twice changes nothing."""
    if not isinstance(module.rejection_sample, RejectionVerification):
        patches.put(module, "rejection_sample", "verify_by_rejection", RejectionVerification())
        patches.put(module, "expand_batch_to_tokens", "verify_by_rejection", verify.expand_batch_to_tokens)


def give_named_logprobs(rejection_sampler) -> None:
    """Let a runner's rejection sampler answer `logprob_token_ids`, which vLLM's knows in steps without drafts only.

    Its rows are as many of each request. Doing so twice changes nothing.
    """
    sampler = rejection_sampler.sampler

    def with_named_logprobs(forward, drafts, draft_probs, logits, metadata):
        if not metadata.logprob_token_ids:
            return forward(drafts, draft_probs, logits, metadata)

        def gather(values, _most, tokens):
            requests = np.repeat(np.arange(len(drafts.num_draft_tokens)), len(tokens) // len(drafts.num_draft_tokens))
            del sampler.gather_logprobs  # this function
            return gather_logprobs(sampler, values, tokens, requests.tolist(), metadata)

        sampler.gather_logprobs = gather
        asked = replace(metadata, logprob_token_ids=None, max_num_logprobs=metadata.max_num_logprobs or 0)
        return forward(drafts, draft_probs, logits, asked)

    patches.wrap(rejection_sampler, "forward", "give_named_logprobs", with_named_logprobs)


def self_check(runner, module) -> None:
    """Prove that the runner's rejection sampler calls the installed function and gives the tokens it must.

    Raises:
        RuntimeError: it verifies elsewhere, or known logits give other tokens.
    """
    verification = module.rejection_sample
    calls = verification.calls
    drafts, logits, metadata, expected = known_step(runner.device)
    found = runner.rejection_sampler(drafts, None, logits, metadata).sampled_token_ids.tolist()[:2]
    called, verification.calls = verification.calls > calls, 0
    if not called:
        raise RuntimeError(
            f"{type(runner.rejection_sampler).__name__} does not call {module.__name__}.rejection_sample, which "
            "rejection sampling replaces: use vLLM 0.23.0"
        )
    if found != expected:
        raise RuntimeError(f"rejection sampling's self-check: known logits gave {found}, expected {expected}")


def known_step(device):
    """A step of three requests for a self-check: a draft rejected at its second token, no draft, and two tokens as
    likely as each other.

    Returns:
        vLLM's SpecDecodeMetadata, float32 [5, 8] logits, SamplingMetadata, and the tokens of the first two requests.
    """
    from vllm.v1.sample.logits_processor import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata

    def integers(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    # SpecDecodeMetadata's fields, without its class: vLLM's and vllm-ascend's samplers read no others.
    drafts = SimpleNamespace(
        draft_token_ids=integers(3, 4),
        num_draft_tokens=[2, 0, 0],
        max_spec_len=2,
        cu_num_draft_tokens=integers(2, 2, 2),
        cu_num_sampled_tokens=integers(3, 4, 5),
        target_logits_indices=integers(0, 1),
        bonus_logits_indices=integers(2, 3, 4),
    )
    # Not minus infinity: vllm-ascend replaces it by the smallest float, which temperature turns back.
    logits = torch.full((5, 8), -1e4)
    logits[range(4), [3, 5, 1, 6]] = logits[4, 2] = logits[4, 7] = 0.0
    none = torch.zeros(3, device=device)
    metadata = SamplingMetadata(
        temperature=none + 0.5,
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[], [], []],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    return drafts, logits.to(device), metadata, [[3, 5, -1], [6, -1, -1]]


def gather_logprobs(sampler, values, tokens, requests: Sequence[int], metadata) -> LogprobsTensors | None:
    """What each row's request asks for; None where nobody asks.

    Root cause: where a request names tokens (`logprob_token_ids`), vLLM 0.23 gives their columns to all requests of a
    step, and in a step with drafts to none. Symptom: what a request gets depends on its batch and on drafts.

    Args:
        sampler: vLLM's.
        values: float [rows, vocabulary].
        tokens: int64 [rows], the sampled ones.
        requests: of each row, by its number in the batch.
        metadata: vLLM's SamplingMetadata.
    """
    most, asked = metadata.max_num_logprobs, metadata.logprob_token_ids or {}
    likeliest = None if most is None else sampler.gather_logprobs(values, most, tokens)
    if not asked:
        return likeliest
    named = {row: asked[request] for row, request in enumerate(requests) if request in asked}
    chosen = sampler.gather_specific_token_logprobs(values, named, tokens)
    if likeliest is None or chosen is None:
        return chosen or likeliest
    missing = chosen.logprobs.shape[1] - likeliest.logprobs.shape[1]
    wide = [[_widened(column, by) for column in one[:2]] for one, by in ((chosen, -missing), (likeliest, missing))]
    is_named = sent(np.array([[row in named] for row in range(len(tokens))]), tokens.device)
    columns = (torch.where(is_named, one, other) for one, other in zip(*wide, strict=True))
    return LogprobsTensors(*columns, likeliest.selected_token_ranks)


def _widened(columns: torch.Tensor, by: int) -> torch.Tensor:
    """Nobody reads the further ones: a request's own come first."""
    return torch.nn.functional.pad(columns, (0, max(0, by)))
