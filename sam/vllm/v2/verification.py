"""Exact verification: the runner's own sampler draws every row, and drafts stand while they equal what it drew.

Its noise is keyed by a request's seed and the token's absolute position, so that a row draws the same token in
whichever step it is computed: the tokens are those of the engine without drafts.
"""

import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler


class ExactVerification(RejectionSampler):
    """In place of the runner's rejection sampler, whose logprobs, chunks and masks it keeps."""

    def __init__(self, sampler, speculative_config, device: torch.device):
        super().__init__(sampler, speculative_config, device)
        self._places = torch.arange(self.num_speculative_steps + 1, device=device)

    def _verify(
        self,
        logits,
        draft_logits,
        draft_sampled,
        pos,
        cu_num_logits,
        idx_mapping,
        idx_mapping_np,
        expanded_idx_mapping,
        expanded_local_pos,
        seq_lens_upper_bound_np,
        verify_draft_sampled,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Processed logits, and what `accept_equal` gives; arguments and results as in vLLM's own."""
        drawn, processed_logits = self.sampler.sample(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
            return_logprobs=self.sampler.get_logprobs_dims(idx_mapping_np) is not None,
        )
        return processed_logits, *accept_equal(drawn, verify_draft_sampled, cu_num_logits, self._places)


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
