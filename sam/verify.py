"""Which drafts stand and which token follows: vectorised, on any device, without changing the distribution.

Two rules. Exact match: draw every position from the target distribution with its own uniform and keep drafts while
they equal the draw; for one-hot drafts this accepts with the same probability as rejection sampling, needs no
residual distribution, and makes the tokens a function of (key, position, logits). Standard: rejection sampling as in
Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv 2211.17192).
"""

from __future__ import annotations

import torch

PLACEHOLDER = -1  # vLLM's mark for "no token here"
GREEDY = 0.0  # the temperature that means argmax


def sample_inverse_cdf(logits: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution.

    Args:
        logits: float32 [rows, vocabulary], temperature and masks applied.
        uniforms: float64 [rows], in (0, 1), one of its own for every row.

    Returns:
        int64 [rows]. A token of probability zero is never drawn.

    The sum is taken in float64: over a vocabulary of 150,000 a float32 sum is off by up to 1e-5 of the mass at its
    end, which is the probability of many a token.
    """
    cumulative = logits.softmax(-1, dtype=torch.float64).cumsum(-1)
    targets = (uniforms * cumulative[:, -1]).unsqueeze(1)
    return torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp_(max=logits.shape[1] - 1)


def accept_matching(sampled: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
    """Keep each request's tokens up to and including the first that differs from its draft.

    Args:
        sampled: int64 [requests, 1 + k], the token drawn at each position; PLACEHOLDER after a request's bonus token.
        drafts: int64 [requests, 1 + k], aligned with it; a value that no token has where there is no draft.

    Returns:
        int32 [requests, 1 + k], PLACEHOLDER after the kept tokens.
    """
    matched = (sampled == drafts).to(torch.int8).cumprod(1).bool()
    kept = torch.ones_like(matched)
    kept[:, 1:] = matched[:, :-1]
    return torch.where(kept, sampled, PLACEHOLDER).to(torch.int32)


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat x[i], [batch], for every token of request i; the value `replace_from` becomes `replace_to`.

    Args:
        cu_num_tokens: [batch], cumulative numbers of tokens.
        num_tokens: their total.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return replaced.repeat_interleave(counts, output_size=num_tokens)


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata,
    synthetic_mode: bool = False,
    synthetic_conditional_rates: torch.Tensor | None = None,
    use_fp64_gumbel: bool = False,
) -> torch.Tensor:
    """Standard rejection sampling with the signature of vLLM 0.23's `rejection_sample`.

    Args:
        draft_token_ids: [tokens]; num_draft_tokens: per request; max_spec_len: the largest of them.
        cu_num_draft_tokens: [batch], cumulative.
        draft_probs: float32 [tokens, vocabulary]; None means one-hot drafts.
        target_logits: float32 [tokens, vocabulary], temperature and masks applied.
        bonus_token_ids: [batch, 1].
        sampling_metadata: vLLM's, for temperature and generators.

    Returns:
        int32 [batch, max_spec_len + 1], PLACEHOLDER after each request's last token.

    Raises:
        ValueError: synthetic acceptance, which changes the distribution.
    """
    if synthetic_mode:
        raise ValueError("rejection_sample_method=synthetic changes what is sampled: use the standard method")
    batch, device = len(num_draft_tokens), target_logits.device
    counts = torch.as_tensor(num_draft_tokens, dtype=torch.int64, device=device)
    request = torch.repeat_interleave(torch.arange(batch, device=device), counts, output_size=len(draft_token_ids))
    position = torch.arange(len(draft_token_ids), device=device) - (counts.cumsum(0) - counts)[request]
    drafts = draft_token_ids.to(torch.int64)

    accepted, recovered = _greedy_rule(drafts, target_logits)
    if not sampling_metadata.all_greedy:
        random = _random_rule(drafts, draft_probs, target_logits, num_draft_tokens, sampling_metadata, request)
        if sampling_metadata.all_random:
            accepted, recovered = random
        else:
            greedy = (sampling_metadata.temperature == GREEDY)[request]
            accepted = torch.where(greedy, accepted, random[0])
            recovered = torch.where(greedy, recovered, random[1])

    grid = torch.zeros((batch, max_spec_len), dtype=torch.int64, device=device)
    grid[request, position] = accepted.to(torch.int64)
    num_accepted = grid.cumprod(1).sum(1)
    output = torch.full((batch, max_spec_len + 1), PLACEHOLDER, dtype=torch.int64, device=device)
    output[request, position] = torch.where(accepted, drafts, recovered)
    output[torch.arange(batch, device=device), counts] = bonus_token_ids.view(-1).to(torch.int64)
    columns = torch.arange(max_spec_len + 1, device=device)
    return torch.where(columns <= num_accepted[:, None], output, PLACEHOLDER).to(torch.int32)


def _greedy_rule(drafts: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = logits.argmax(-1)
    return drafts == best, best


def _random_rule(drafts, draft_probs, logits, num_draft_tokens, metadata, request):
    """Accept with min(1, p/q); where rejected, draw from max(0, p - q), by the exponential race."""
    target = logits.softmax(-1, dtype=torch.float32)
    p = target.gather(1, drafts[:, None]).squeeze(1)
    if draft_probs is None:
        q = torch.ones_like(p)
        residual = target.scatter(1, drafts[:, None], 0.0)
    else:
        q = draft_probs.gather(1, drafts[:, None]).squeeze(1)
        residual = (target - draft_probs).clamp_min_(0.0)
    uniforms = torch.empty(len(drafts), dtype=torch.float64, device=logits.device).uniform_()
    race = torch.empty((len(num_draft_tokens), logits.shape[1]), device=logits.device).exponential_()
    start = 0
    for index, count in enumerate(num_draft_tokens):
        if count and (generator := metadata.generators.get(index)) is not None:
            uniforms[start : start + count].uniform_(generator=generator)
            race[index].exponential_(generator=generator)
        start += count
    return (q > 0) & (p.double() >= uniforms * q.double()), (residual / race[request]).argmax(-1)
