"""Exact-match sampling in vLLM's model runner, for every step, with and without drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from sam import verify
from sam.keys import sample_key, uniforms

NO_DRAFT = -2  # equal to no token and not to the placeholder


@dataclass
class _Rows:
    """Where each row of a step's logits belongs: rows of a request stand together, drafts first, bonus last."""

    counts: np.ndarray  # int64 [requests], rows of each request
    request: np.ndarray  # int64 [rows]
    offset: np.ndarray  # int64 [rows], position within the request
    start: np.ndarray  # int64 [requests], first row of each request

    @classmethod
    def of(cls, num_draft_tokens, requests: int) -> _Rows:
        counts = np.ones(requests, dtype=np.int64)
        if num_draft_tokens is not None:
            counts += np.asarray(num_draft_tokens)
        request = np.repeat(np.arange(requests), counts)
        start = np.cumsum(counts) - counts
        return cls(counts, request, np.arange(len(request)) - start[request], start)


class ExactSampler:
    """Replaces `GPUModelRunner._sample` on one model runner.

    Keys come from SamplingParams.seed, or from the engine's seed and the request id; positions are those of the
    response, so that preemption and batching change nothing.
    """

    def __init__(self, runner):
        self.runner = runner
        self._keys: dict[str, int] = {}

    def __call__(self, logits: torch.Tensor, spec_decode_metadata) -> SamplerOutput:
        batch = self.runner.input_batch
        batch.update_async_output_token_ids()
        metadata = batch.sampling_metadata
        drafts = spec_decode_metadata
        rows = _Rows.of(drafts.num_draft_tokens if drafts is not None else None, len(batch.req_ids))
        logits = logits.to(torch.float32)
        processed = self._process(logits, rows, metadata, drafts)
        tokens = self._draw(processed, rows, metadata)
        logprobs = None
        if metadata.max_num_logprobs is not None:
            logprobs = self._logprobs(logits, processed, tokens, metadata.max_num_logprobs)
        if drafts is None or (width := int(rows.counts.max())) == 1:
            return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=logprobs)
        return self._verified(tokens, logprobs, rows, width, drafts.draft_token_ids)

    def _process(self, logits, rows: _Rows, metadata, drafts) -> torch.Tensor:
        """Temperature, masks and penalties as vLLM applies them, for target and bonus rows alike."""
        if not _is_plain(metadata):
            return self._process_by_vllm(logits, metadata, drafts)
        if metadata.all_greedy:
            return logits
        temperature = metadata.temperature[torch.from_numpy(rows.request).to(logits.device)]
        return logits / torch.where(temperature == verify.GREEDY, 1.0, temperature)[:, None]

    def _process_by_vllm(self, logits, metadata, drafts) -> torch.Tensor:
        from vllm.v1.sample import rejection_sampler as stock
        from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

        sampler = self.runner.sampler
        bonus = logits.clone() if drafts is None else logits[drafts.bonus_logits_indices]
        bonus = sampler.apply_logits_processors(bonus, metadata, drafts is not None)
        if not metadata.all_greedy:
            bonus = sampler.apply_temperature(bonus, metadata.temperature, metadata.all_random)
            for processor in metadata.logitsprocs.argmax_invariant:
                bonus = processor.apply(bonus)
            bonus = apply_top_k_top_p(bonus, metadata.top_k, metadata.top_p)
        if drafts is None:
            return bonus
        target = logits[drafts.target_logits_indices]
        target = self.runner.rejection_sampler.apply_logits_processors(target, metadata, drafts)
        processed = torch.empty_like(logits)
        processed[drafts.target_logits_indices] = stock.apply_sampling_constraints(
            target, drafts.cu_num_draft_tokens, metadata
        )
        processed[drafts.bonus_logits_indices] = bonus
        return processed

    def _draw(self, processed, rows: _Rows, metadata) -> torch.Tensor:
        if metadata.all_greedy:
            return processed.argmax(-1)
        keys, positions = self._identity()
        draws = torch.from_numpy(uniforms(keys[rows.request], positions[rows.request] + rows.offset))
        tokens = verify.sample_inverse_cdf(processed, draws.to(processed.device))
        if metadata.all_random:
            return tokens
        greedy = metadata.temperature[torch.from_numpy(rows.request).to(processed.device)] == verify.GREEDY
        return torch.where(greedy, processed.argmax(-1), tokens)

    def _identity(self) -> tuple[np.ndarray, np.ndarray]:
        """Sample key and next output position of every request in the batch."""
        runner = self.runner
        ids = runner.input_batch.req_ids
        if len(self._keys) > 2 * len(runner.requests) + 1024:
            self._keys = {name: key for name, key in self._keys.items() if name in runner.requests}
        keys = np.empty(len(ids), dtype=np.int64)
        positions = np.empty(len(ids), dtype=np.int64)
        for row, request_id in enumerate(ids):
            request = runner.requests[request_id]
            key = self._keys.get(request_id)
            if key is None:
                seed = request.sampling_params.seed
                key = self._keys[request_id] = sample_key(seed, runner.model_config.seed, request_id)
            keys[row], positions[row] = key, len(request.output_token_ids)
        return keys, positions

    def _logprobs(self, logits, processed, tokens, number: int) -> LogprobsTensors:
        sampler = self.runner.sampler
        source = processed if sampler.logprobs_mode.startswith("processed") else logits
        values = source if sampler.logprobs_mode.endswith("logits") else sampler.compute_logprobs(source)
        return sampler.gather_logprobs(values, number, tokens)

    def _verified(self, tokens, logprobs, rows: _Rows, width: int, draft_token_ids) -> SamplerOutput:
        device = tokens.device
        request, offset = (torch.from_numpy(x).to(device) for x in (rows.request, rows.offset))
        is_draft = torch.from_numpy(rows.offset < rows.counts[rows.request] - 1).to(device)
        sampled = torch.full((len(rows.counts), width), verify.PLACEHOLDER, dtype=torch.int64, device=device)
        drafts = torch.full_like(sampled, NO_DRAFT)
        sampled[request, offset] = tokens
        drafts[request[is_draft], offset[is_draft]] = draft_token_ids.to(torch.int64)
        if logprobs is not None:
            # vLLM filters a [requests x width] list by the placeholders; rows beyond a request's own are dropped there.
            index = np.minimum(rows.start[:, None] + np.arange(width), len(rows.request) - 1).ravel()
            index = torch.from_numpy(index).to(device)
            logprobs = LogprobsTensors(
                logprobs.logprob_token_ids[index],
                logprobs.logprobs[index],
                logprobs.selected_token_ranks[index],
            )
        return SamplerOutput(sampled_token_ids=verify.accept_matching(sampled, drafts), logprobs_tensors=logprobs)


def _is_plain(metadata) -> bool:
    """Whether temperature is all there is to apply."""
    processors = metadata.logitsprocs
    return (
        metadata.no_penalties
        and metadata.top_k is None
        and metadata.top_p is None
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not _active(processors.argmax_invariant)
        and not _active(processors.non_argmax_invariant)
        and (
            metadata.thinking_budget_state_holder is None
            or not metadata.thinking_budget_state_holder.has_tracked_requests()
        )
    )


def _active(processors) -> bool:
    """vLLM's built-in processors are always listed; they say by their state whether a request uses them."""
    return any(
        getattr(p, "min_p_count", 0) or getattr(p, "biases", None) or getattr(p, "min_toks", None) for p in processors
    ) or any(type(p).__module__ != "vllm.v1.sample.logits_processor.builtin" for p in processors)
