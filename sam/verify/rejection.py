"""Rejection sampling (arXiv 2211.17192), vectorised, with the signatures of vLLM 0.23.

Given the same random numbers `rejection_sample` returns what vllm-ascend 0.23.0.post1's returns.
"""

from typing import NamedTuple, Self

import torch

from sam.verify.exact import GREEDY, PLACEHOLDER


class _Layout(NamedTuple):
    counts: torch.Tensor  # int64 [batch], draft tokens of each request
    request: torch.Tensor  # int64 [tokens]
    position: torch.Tensor  # int64 [tokens], within the request


def _layout(cu_num_draft_tokens: torch.Tensor, num_tokens: int) -> _Layout:
    ends = cu_num_draft_tokens.to(torch.int64)
    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    batch = torch.arange(len(ends), device=ends.device)
    request = batch.repeat_interleave(counts, output_size=num_tokens)
    position = torch.arange(num_tokens, device=ends.device) - (ends - counts)[request]
    return _Layout(counts, request, position)


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


def _write(
    output: torch.Tensor,
    chosen: torch.Tensor,
    accepted: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    layout: _Layout,
    rows: torch.Tensor | None,
) -> None:
    """Write into `output` the tokens up to the first rejected one, and the bonus token where none is rejected."""
    batch, width = output.shape
    num_accepted = _num_accepted(accepted, layout, (batch, width - 1))
    tokens = torch.full_like(output, PLACEHOLDER)
    tokens[layout.request, layout.position] = chosen.to(output.dtype)
    tokens[torch.arange(batch, device=output.device), layout.counts] = bonus_token_ids.view(-1).to(output.dtype)
    kept = torch.arange(width, device=output.device) <= num_accepted[:, None]
    if rows is not None:
        kept &= rows[:, None]
    output.copy_(torch.where(kept, tokens, output))


def _num_accepted(accepted: torch.Tensor, layout: _Layout, shape: tuple[int, int]) -> torch.Tensor:
    """int64 [batch]: draft tokens before the first rejected one; `accepted` is bool [tokens]."""
    by_request = accepted.new_zeros(shape, dtype=torch.int64)
    by_request[layout.request, layout.position] = accepted.to(torch.int64)
    return by_request.cumprod(1).sum(1)


class _Drafts(NamedTuple):
    ids: torch.Tensor  # int64 [tokens], clamped into the vocabulary
    known: torch.Tensor  # bool [tokens], false for ids outside the vocabulary

    @classmethod
    def clamped(cls, draft_token_ids: torch.Tensor, vocabulary: int) -> Self:
        ids = draft_token_ids.to(torch.int64)
        clamped = ids.clamp(0, vocabulary - 1)
        return cls(clamped, clamped == ids)

    def at(self, rows: torch.Tensor) -> Self:
        return _Drafts(self.ids[rows], self.known[rows])


def _accept(drafts: _Drafts, draft_probs, target_probs, uniforms) -> torch.Tensor:
    """bool [tokens], the accepted drafts: none outside the vocabulary, none in a row of NaN."""
    # In float64, as the uniforms are.
    p = target_probs.gather(1, drafts.ids[:, None]).squeeze(1).to(torch.float64)
    if draft_probs is None:
        return drafts.known & (p >= uniforms)
    q = draft_probs.gather(1, drafts.ids[:, None]).squeeze(1).to(torch.float64)
    return drafts.known & (q > 0) & (p / q >= uniforms)


def seeded_uniforms(num_draft_tokens, generators, device) -> torch.Tensor:
    """float64 [tokens], as vLLM draws them: one draw for all, then each seeded request's own."""
    uniforms = torch.rand((sum(num_draft_tokens),), dtype=torch.float64, device=device)
    start = 0
    for index, count in enumerate(num_draft_tokens):
        if count and (generator := generators.get(index)) is not None:
            uniforms[start : start + count].uniform_(generator=generator)
        start += count
    return uniforms


def _exponential_noise(num_draft_tokens, vocabulary, sampling_metadata, device, dtype) -> torch.Tensor:
    noise = torch.empty((len(num_draft_tokens), vocabulary), dtype=dtype, device=device).exponential_()
    for index, generator in sampling_metadata.generators.items():
        if num_draft_tokens[index] > 0:
            noise[index].exponential_(generator=generator)
    return noise


def _recover(drafts: _Drafts, draft_probs, target_probs, noise) -> torch.Tensor:
    """A draw from max(0, p - q) by the exponential race, in place on no argument; all [rows, vocabulary].

    From p alone where the draft is outside the vocabulary.
    """
    if draft_probs is None:
        race = target_probs / noise
        ids = drafts.ids[:, None]
        return race.scatter_(1, ids, race.gather(1, ids).masked_fill(drafts.known[:, None], 0.0)).argmax(-1)
    return ((target_probs - draft_probs * drafts.known[:, None]).clamp_min_(0.0) / noise).argmax(-1)


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
    """Rejection sampling with the signature of vLLM 0.23's `rejection_sample`.

    Args:
        draft_token_ids: [tokens]; one outside the vocabulary is rejected for a plain sample.
        num_draft_tokens: per request; max_spec_len: the largest of them.
        cu_num_draft_tokens: [batch], cumulative.
        draft_probs: float32 [tokens, vocabulary]; None means one-hot drafts.
        target_logits: float32 [tokens, vocabulary], temperature and masks applied; a row without mass gives token 0.
        bonus_token_ids: [batch, 1].
        sampling_metadata: vLLM's, for temperature and generators.

    Returns:
        int32 [batch, max_spec_len + 1], PLACEHOLDER after each request's last token.

    Raises:
        ValueError: synthetic acceptance, which changes the distribution.

    A recovered token is drawn for each request's first rejection only, so the noise and the residual are
    [batch, vocabulary] instead of [tokens, vocabulary].
    """
    if synthetic_mode:
        raise ValueError(
            "rejection_sample_method=synthetic changes what is sampled: use rejection_sample_method=standard"
        )
    batch, device = len(num_draft_tokens), target_logits.device
    output = torch.full((batch, max_spec_len + 1), PLACEHOLDER, dtype=torch.int32, device=device)
    layout = _layout(cu_num_draft_tokens, len(draft_token_ids))
    is_random = None
    if not sampling_metadata.all_random:
        is_greedy = None if sampling_metadata.all_greedy else sampling_metadata.temperature == GREEDY
        best = target_logits.argmax(-1)
        _write(output, best, draft_token_ids == best, bonus_token_ids, layout, is_greedy)
        if is_greedy is None:
            return output
        is_random = ~is_greedy

    uniforms = seeded_uniforms(num_draft_tokens, sampling_metadata.generators, device)
    dtype = torch.float64 if use_fp64_gumbel else torch.float32
    noise = _exponential_noise(num_draft_tokens, target_logits.shape[1], sampling_metadata, device, dtype)
    if not len(draft_token_ids):
        _write(output, draft_token_ids, draft_token_ids.bool(), bonus_token_ids, layout, is_random)
        return output

    target_probs = target_logits.softmax(-1, dtype=torch.float32)
    drafts = _Drafts.clamped(draft_token_ids, target_logits.shape[1])
    accepted = _accept(drafts, draft_probs, target_probs, uniforms)
    # The row of each request's first rejection; any row where there is none, whose token is then not used.
    first = cu_num_draft_tokens.to(torch.int64) - layout.counts + _num_accepted(accepted, layout, (batch, max_spec_len))
    first = first.clamp(max=len(draft_token_ids) - 1)
    residual_of = None if draft_probs is None else draft_probs[first]
    recovered = _recover(drafts.at(first), residual_of, target_probs[first], noise)
    chosen = torch.where(accepted, drafts.ids, recovered[layout.request])
    _write(output, chosen, accepted, bonus_token_ids, layout, is_random)
    return output
