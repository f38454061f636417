"""Rejection sampling (Leviathan et al., arXiv 2211.17192), with the signatures of vLLM 0.23 and 0.24."""

import numpy as np
import torch

from sam.verify.exact import GREEDY, PLACEHOLDER, sample_inverse_cdf, sent


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


def _uniforms(counts: list[int], generators, device) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [tokens] that accept drafts, and [batch] that draw in place of a rejected one: no number decides two
    things. A seeded request's are its generator's."""
    accepting = torch.rand(sum(counts), dtype=torch.float64, device=device)
    drawing = torch.rand(len(counts), dtype=torch.float64, device=device)
    start = 0
    for request, count in enumerate(counts):
        generator = generators.get(request)
        if count and generator is not None:
            accepting[start : start + count].uniform_(generator=generator)
            drawing[request : request + 1].uniform_(generator=generator)
        start += count
    return accepting, drawing


def _probabilities(logits: torch.Tensor, request: torch.Tensor, sampling_metadata) -> torch.Tensor:
    """float32 [tokens, vocabulary]; of greedy requests all on the likeliest token."""
    probs = logits.softmax(-1, dtype=torch.float32)
    if sampling_metadata.all_random:
        return probs
    certain = torch.zeros_like(probs).scatter_(1, logits.argmax(-1, keepdim=True), 1.0)
    if sampling_metadata.all_greedy:
        return certain
    return torch.where((sampling_metadata.temperature == GREEDY)[request, None], certain, probs)


def _replacements(drafts, inside, draft_probs, probs, uniforms) -> torch.Tensor:
    """int64 [batch], in place of `drafts` (int64 [batch]): of max(0, p - q), and of p where the draft is no token."""
    is_token = (inside == drafts)[:, None]
    if draft_probs is None:
        own = inside[:, None]
        rest = probs.scatter(1, own, probs.gather(1, own).masked_fill(is_token, 0.0))
    else:
        rest = (probs - draft_probs * is_token).clamp_min_(0.0)
    return sample_inverse_cdf(rest.log(), uniforms)


def rejection_sample(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    _cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata,
    **_others,
) -> torch.Tensor:
    """Accept a draft with probability min(1, p / q); draw from max(0, p - q) in place of the first rejected one.

    Args:
        draft_token_ids: [tokens]; in place of one outside the vocabulary a plain sample is drawn.
        num_draft_tokens: per request; max_spec_len: the largest of them.
        draft_probs: float32 [tokens, vocabulary]; None means one-hot drafts.
        target_logits: float32 [tokens, vocabulary], temperature and masks applied; a row without mass gives token 0.
        bonus_token_ids: [batch, 1], of requests all of whose drafts are accepted.
        _others: of synthetic acceptance, which sam.vllm.plugin refuses, and of the noise of vLLM's own draws.

    Returns:
        int32 [batch, max_spec_len + 1], PLACEHOLDER after each request's last token.
    """
    device = target_logits.device
    batch = len(num_draft_tokens)
    total = len(draft_token_ids)
    if not total:
        return bonus_token_ids.to(torch.int32)
    counts = np.array(num_draft_tokens)
    starts = counts.cumsum() - counts
    request = np.repeat(np.arange(batch), counts)
    request, position = sent(np.stack([request, np.arange(total) - starts[request]]), device)
    counts, starts = sent(np.stack([counts, starts]), device)

    probs = _probabilities(target_logits, request, sampling_metadata)
    accepting, drawing = _uniforms(num_draft_tokens, sampling_metadata.generators, device)
    drafts = draft_token_ids.to(torch.int64)
    inside = drafts.clamp(0, target_logits.shape[1] - 1)
    p = probs.gather(1, inside[:, None]).squeeze(1).to(torch.float64)
    q = 1.0 if draft_probs is None else draft_probs.gather(1, inside[:, None]).squeeze(1).to(torch.float64)
    accepted = torch.zeros(batch, max_spec_len, dtype=torch.int64, device=device)
    accepted[request, position] = ((inside == drafts) & (p > accepting * q)).to(torch.int64)
    kept = accepted.cumprod(1).sum(1)

    row = (starts + kept).clamp(max=total - 1)  # of the first rejected draft; any where there is none
    of_drafts = None if draft_probs is None else draft_probs[row]
    drawn = _replacements(drafts[row], inside[row], of_drafts, probs[row], drawing)
    last = torch.where(kept == counts, bonus_token_ids.view(-1).to(torch.int64), drawn)
    tokens = torch.full((batch, max_spec_len + 1), PLACEHOLDER, dtype=torch.int64, device=device)
    tokens[request, position] = drafts
    columns = torch.arange(max_spec_len + 1, device=device)
    tokens = torch.where(columns < kept[:, None], tokens, PLACEHOLDER)
    return tokens.scatter_(1, kept[:, None], last[:, None]).to(torch.int32)
