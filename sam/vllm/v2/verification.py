"""Exact verification: the runner's own sampler draws every row, and drafts stand while they equal what it drew.

Its noise is keyed by a request's seed and the token's absolute position, so that a row draws the same token in
whichever step it is computed: the tokens are those of the engine without drafts.
"""

from dataclasses import replace

import torch
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler


class ExactVerification:
    """In place of the runner's rejection sampler.

    Log-probabilities are the sampler's own, of named tokens too. Unlike vLLM's rejection sampler it does not go through
    a large batch in pieces.

    Args:
        sampler: the runner's.
        k: draft tokens of a request at most.
    """

    enable_adaptive_verification = False

    def __init__(self, sampler: Sampler, k: int):
        self.sampler = sampler
        self._k = k
        self._places: torch.Tensor | None = None

    def __call__(
        self,
        logits: torch.Tensor,
        input_batch: InputBatch,
        draft_logits: torch.Tensor | None = None,
        invalid_drafts: torch.Tensor | None = None,
    ) -> SamplerOutput:
        """The tokens of a step with drafts; arguments and results as of vLLM's own.

        Args:
            logits: [rows, vocabulary], a row for each request's last token and each draft token.
            invalid_drafts: bool [rows], drafts that a grammar forbids.
        """
        if self._places is None:  # not made while the model is loaded: sleep would take it with the weights
            self._places = torch.arange(self._k + 1, device=logits.device)
        output = self.sampler(logits, input_batch)
        inputs = input_batch.input_ids[input_batch.logits_indices]
        if invalid_drafts is not None:
            inputs = inputs.masked_fill(invalid_drafts, -1)
        drawn = output.sampled_token_ids[:, 0]
        tokens, kept = accept_equal(drawn, inputs, input_batch.cu_num_logits, self._places)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            kept,
            input_batch.seq_lens,
            input_batch.cu_num_logits,
            input_batch.idx_mapping,
            self.sampler.req_states.prefill_len.gpu,
        )
        return replace(output, sampled_token_ids=tokens, num_sampled=num_sampled, num_rejected=num_rejected)


def accept_equal(
    drawn: torch.Tensor, inputs: torch.Tensor, cu_num_logits: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keep each request's tokens up to and including the first that differs from its draft; the host waits for nothing.

    Args:
        drawn: int64 [rows], the token drawn in each row; rows of a request stand together.
        inputs: int [rows], the token that each row was computed from: after a request's first its drafts; -1 for none.
        cu_num_logits: int32 [requests + 1], where each request's rows begin.
        places: int64 [1 + k], 0 to k.

    Returns:
        int64 [requests, 1 + k], the tokens, of which those behind the kept ones mean nothing; int32 [requests], how
        many are kept.
    """
    rows = cu_num_logits[:-1, None] + places
    is_row = rows < cu_num_logits[1:, None]
    rows.clamp_(max=len(drawn) - 1)
    tokens = drawn[rows]
    drafts = inputs[rows].masked_fill_(~is_row, -1)
    stands = (tokens[:, :-1] == drafts[:, 1:]).cumprod(1, dtype=torch.int32)
    return tokens, stands.sum(1, dtype=torch.int32) + 1
