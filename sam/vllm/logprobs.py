"""Log-probabilities that requests ask for: the likeliest tokens', or those of tokens that they name."""

from collections.abc import Sequence

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors

from sam.verify.transfer import sent


def gather(sampler, values, tokens, requests: Sequence[int], metadata) -> LogprobsTensors | None:
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
