"""How a draft token is taken from a draft model's logits: the likeliest, or a draw from their distribution.

A draw has a uniform of the request's key and the token's position, on every rank the same.

- Under exact verification it is the very uniform with which the target's token will be drawn. The token that comes out
  is a function of that uniform and the target's distribution alone, whatever was drafted; and two draws with one
  uniform from similar distributions are mostly equal (drafter-invariant speculative decoding: Daliri et al., "Coupling
  without Communication and Drafter-Invariant Speculative Decoding", arXiv 2408.07978; here by inverse CDF).
- Under rejection sampling a draft has to be independent of what decides on it: it has a stream of uniforms of its own,
  and the distribution that it was drawn from goes to the verification.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from sam import verify
from sam.verify.transfer import sent
from sam.verify.uniforms import rng_key, uniforms

OF_TARGET, OF_DRAFTS = 0, 1  # streams of sam.verify.uniforms


class Chosen(NamedTuple):
    """Draft tokens of one pass.

    Attributes:
        tokens: int64 [rows].
        finite: bool [rows], whether each came from finite logits.
        probabilities: float32 [rows, vocabulary] that they were drawn from; None if nobody asks for them.
    """

    tokens: torch.Tensor
    finite: torch.Tensor
    probabilities: torch.Tensor | None = None


class GreedyDrafts:
    """The likeliest token."""

    def choose(self, logits: torch.Tensor, pass_: int) -> Chosen:
        """Take a token of each row's logits, [rows, vocabulary], in pass number `pass_` of a step."""
        values, tokens = logits.max(dim=-1)
        return Chosen(tokens, torch.isfinite(values))


class DrawnDrafts:
    """A draw at each request's temperature; of greedy requests the likeliest token. Top-k and top-p are left out.

    Args:
        temperatures: float32 [rows]; 0 is greedy.
        draws: float64 [rows, passes], a uniform for each token.
        keeps_probabilities: whether verification asks for them.
        device: of the logits.
    """

    def __init__(self, temperatures: np.ndarray, draws: np.ndarray, keeps_probabilities: bool, device: torch.device):
        is_greedy = temperatures == verify.GREEDY
        self._are_greedy = sent(is_greedy, device)
        self._temperatures = sent(np.where(is_greedy, 1.0, temperatures).astype(np.float32), device)
        self._draws, self._keeps = sent(draws, device), keeps_probabilities

    def choose(self, logits: torch.Tensor, pass_: int) -> Chosen:
        """As GreedyDrafts'."""
        values, likeliest = logits.max(dim=-1)
        finite = torch.isfinite(values)
        scaled = logits.to(torch.float32) / self._temperatures[:, None]
        drawn = verify.sample_inverse_cdf(scaled, self._draws[:, pass_])
        tokens = torch.where(self._are_greedy, likeliest, drawn)
        if not self._keeps:
            return Chosen(tokens, finite)
        # Without a distribution a draft is as if nobody would have drawn it: it is rejected for a plain sample.
        return Chosen(tokens, finite, torch.where(finite[:, None], scaled.softmax(-1), 0.0))


def drawn_drafts(runner, rows: Sequence[int], passes: int, verification: str, device: torch.device) -> DrawnDrafts:
    """For rows of the model runner's batch, whose tokens so far are all in their requests' output.

    Args:
        verification: exact or rejection.
    """
    batch = runner.input_batch
    requests = [runner.requests[batch.req_ids[row]] for row in rows]
    seeds = [
        rng_key(request.sampling_params.seed, runner.model_config.seed, batch.req_ids[row])
        for row, request in zip(rows, requests, strict=True)
    ]
    positions = np.array([request.num_tokens for request in requests])[:, None] + np.arange(passes)
    keys = np.repeat(np.array(seeds, np.int64), passes)
    is_exact = verification == "exact"
    draws = uniforms(keys, positions.ravel(), OF_TARGET if is_exact else OF_DRAFTS).reshape(positions.shape)
    return DrawnDrafts(batch.temperature_cpu[list(rows)], draws, not is_exact, device)


def draft_probabilities(metadata, request_ids: list[str], drawn: "Drawn", vocabulary: int) -> torch.Tensor:
    """What a step's drafts were drawn from, one after the other; a draft that was not drawn was certain.

    Args:
        metadata: vLLM's SpecDecodeMetadata.
        request_ids: of the batch.
        vocabulary: of the target.

    Returns:
        float32 [draft tokens, vocabulary].
    """
    row_of = {name: row for row, name in enumerate(drawn.names)}
    tokens = metadata.draft_token_ids.to(torch.int64)
    found = torch.zeros((len(tokens), vocabulary), dtype=torch.float32, device=tokens.device)
    found.scatter_(1, tokens.clamp(0, vocabulary - 1)[:, None], 1.0)
    width, begin = min(vocabulary, drawn.probabilities.shape[-1]), 0
    for request_id, count in zip(request_ids, metadata.num_draft_tokens, strict=False):
        if (row := row_of.get(request_id)) is not None:
            found[begin : begin + count] = 0.0
            found[begin : begin + count, :width] = drawn.probabilities[row, :count, :width]
        begin += count
    return found


class Drawn(NamedTuple):
    """Drafts that a step verifies as drawn.

    Attributes:
        names: their requests; other requests' drafts, if any, are sam's.
        probabilities: float32 [names, passes, vocabulary].
    """

    names: list[str]
    probabilities: torch.Tensor
