"""Exact-match sampling in vLLM's model runner, for every step, with and without drafts."""

import contextlib
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Self

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from sam import verify
from sam.verify.exact import rng_key, sent, uniforms
from sam.vllm import hooks
from sam.vllm.rejection_sampler import gather_logprobs, known_step

NO_DRAFT = -2  # equal to no token and not to the placeholder


@dataclass
class _Rows:
    """Where each row of a step's logits belongs: rows of a request stand together, drafts first, bonus last."""

    counts: np.ndarray  # int64 [requests], rows of each request
    request: np.ndarray  # int64 [rows]
    offset: np.ndarray  # int64 [rows], position within the request
    start: np.ndarray  # int64 [requests], first row of each request

    def repeat(self, values):
        """[requests] of numpy or torch to [rows]: each request's value for each of its rows."""
        if len(self.request) == len(self.counts):
            return values
        index = self.request if isinstance(values, np.ndarray) else sent(self.request, values.device)
        return values[index]

    @classmethod
    @functools.lru_cache(maxsize=8)  # a batch keeps its size for many steps
    def plain_decode(cls, requests: int) -> Self:
        """Rows of a step without drafts."""
        each = np.arange(requests)
        return cls(np.ones_like(each), each, np.zeros_like(each), each)

    @classmethod
    def of(cls, num_draft_tokens, requests: int) -> Self:
        """Rows of a step with `num_draft_tokens` (int [requests], or None for no drafts)."""
        if num_draft_tokens is None:
            return cls.plain_decode(requests)
        counts = 1 + np.asarray(num_draft_tokens, dtype=np.int64)
        request = np.repeat(np.arange(requests), counts)
        start = np.cumsum(counts) - counts
        return cls(counts, request, np.arange(len(request)) - start[request], start)


class ExactSampler:
    """Replaces `GPUModelRunner._sample` on one model runner.

    Keys come from SamplingParams.seed, or from the engine's seed and the request id; positions count from the prompt's
    first token. So batching and preemption change nothing, nor where a seeded response is cut and goes on as a new
    request, whose prompt ends with the tokens so far.
    """

    def __init__(self, runner):
        self.runner = runner
        self._rng_keys: dict[str, int] = {}
        self.calls = 0

    def forget(self) -> None:
        """Clear the cached keys and the count of calls, as after the self-check."""
        self._rng_keys.clear()
        self.calls = 0

    def __call__(self, logits: torch.Tensor, spec_decode_metadata) -> SamplerOutput:
        self.calls += 1
        batch = self.runner.input_batch
        # Seeded requests' generators are not used; with them vLLM fails on CPU where a prompt comes in pieces
        # ("CPU Generator does not use offset", gpu_model_runner.py, _bookkeeping_sync).
        batch.generators.clear()
        hooks.fill_last_placeholder(self.runner)
        metadata = batch.sampling_metadata
        drafts = spec_decode_metadata
        rows = _Rows.of(drafts.num_draft_tokens if drafts is not None else None, len(batch.req_ids))
        if len(logits) > len(rows.request):  # vllm-ascend pads them where its output layer is spread over ranks
            logits = logits[: len(rows.request)]
        logits = logits.to(torch.float32)
        processed = self._process(logits, rows, metadata, drafts)
        tokens = self.draw(processed, rows, metadata)
        listed = self._logprobs(logits, processed, tokens, rows, metadata)
        if drafts is None or (width := int(rows.counts.max())) == 1:
            return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=listed)
        return self._verified(tokens, listed, rows, width, drafts.draft_token_ids)

    def _process(self, logits, rows: _Rows, metadata, drafts) -> torch.Tensor:
        """Masks, penalties, temperature, top-k and top-p as vLLM applies them, for all rows alike."""
        processed = logits if _is_plain(metadata) else self._masked_and_penalised(logits.clone(), metadata, drafts)
        if metadata.all_greedy:
            return processed
        temperature = rows.repeat(metadata.temperature)[:, None]
        if not metadata.all_random:
            temperature = torch.where(temperature == verify.GREEDY, 1.0, temperature)
        is_read_later = processed is logits and (self._logprobs_mode(metadata) or "").startswith("raw")
        # As vLLM's own sampler, in place: another copy of the logits takes as long as drawing from them.
        processed = processed / temperature if is_read_later else processed.div_(temperature)
        # Min-p: vLLM refuses it with a speculative_config, so there is one row for each request.
        for processor in metadata.logitsprocs.argmax_invariant:
            processed = processor.apply(processed)
        if metadata.top_k is None and metadata.top_p is None:
            return processed
        top_k, top_p = (x if x is None else rows.repeat(x) for x in (metadata.top_k, metadata.top_p))
        # vllm-ascend's sampler brings its own function: vLLM's Triton kernel is not for that device.
        constrain = getattr(self.runner.sampler.topk_topp_sampler, "apply_top_k_top_p", apply_top_k_top_p)
        return constrain(processed, top_k, top_p)

    def _masked_and_penalised(self, logits, metadata, drafts) -> torch.Tensor:
        """`logits` is changed in place."""
        sampler = self.runner.sampler
        if drafts is None:
            return sampler.apply_logits_processors(logits, metadata, False)
        with _min_tokens_behind_drafts(metadata, drafts.num_draft_tokens):
            bonus = sampler.apply_logits_processors(logits[drafts.bonus_logits_indices], metadata, True)
        target = logits[drafts.target_logits_indices]
        target = self.runner.rejection_sampler.apply_logits_processors(target, metadata, drafts)
        logits[drafts.target_logits_indices] = target
        logits[drafts.bonus_logits_indices] = bonus
        return logits

    def draw(self, processed, rows: _Rows, metadata) -> torch.Tensor:
        """One token for each row, int64 [rows]; sam.vllm.bench.forced_text wraps it."""
        if metadata.all_greedy:
            return processed.argmax(-1)
        rng_keys, positions = self._identity()
        draws = sent(uniforms(rows.repeat(rng_keys), rows.repeat(positions) + rows.offset), processed.device)
        tokens = verify.sample_inverse_cdf(processed, draws)
        if metadata.all_random:
            return tokens
        greedy = rows.repeat(metadata.temperature) == verify.GREEDY
        return torch.where(greedy, processed.argmax(-1), tokens)

    def _identity(self) -> tuple[np.ndarray, np.ndarray]:
        """RNG key and next position of every request in the batch, int64 [requests] each.

        With asynchronous scheduling the output holds a placeholder for every token under way, so its length is right.
        """
        runner = self.runner
        if len(self._rng_keys) > 2 * len(runner.requests) + 1024:
            self._rng_keys = {name: key for name, key in self._rng_keys.items() if name in runner.requests}
        requests = hooks.requests_of_rows(runner)
        rng_keys, positions = np.empty((2, len(requests)), dtype=np.int64)
        for row, request_id in enumerate(requests):
            request = runner.requests[request_id]
            key = self._rng_keys.get(request_id)
            if key is None:
                seed = request.sampling_params.seed
                key = self._rng_keys[request_id] = rng_key(seed, runner.model_config.seed, request_id)
            rng_keys[row], positions[row] = key, request.num_tokens
        return rng_keys, positions

    def _logprobs_mode(self, metadata) -> str | None:
        """What log-probabilities are asked for; None if none are."""
        if metadata.max_num_logprobs is None and not metadata.logprob_token_ids:
            return None
        # The engine's setting: vllm-ascend's own sampler does not know it and always gives raw ones.
        return getattr(self.runner.model_config, "logprobs_mode", self.runner.sampler.logprobs_mode)

    def _logprobs(self, logits, processed, tokens, rows: _Rows, metadata) -> LogprobsTensors | None:
        sampler, mode = self.runner.sampler, self._logprobs_mode(metadata)
        if mode is None:
            return None
        source = processed if mode.startswith("processed") else logits
        values = source if mode.endswith("logits") else sampler.compute_logprobs(source)
        return gather_logprobs(sampler, values, tokens, rows.request.tolist(), metadata)

    def _verified(self, tokens, listed, rows: _Rows, width: int, draft_token_ids) -> SamplerOutput:
        device = tokens.device
        kept, source_rows = self._accepted(tokens, rows, width, draft_token_ids)
        if listed is not None:
            # vLLM filters a [requests x width] list by the placeholders; rows beyond a request's own are dropped there.
            index = sent(rows.start, device)[source_rows] + torch.arange(width, device=device)
            index = index.clamp(max=len(rows.request) - 1).ravel()
            columns = listed.logprob_token_ids, listed.logprobs, listed.selected_token_ranks
            listed = LogprobsTensors(*(column[index] for column in columns))
        return SamplerOutput(sampled_token_ids=kept, logprobs_tensors=listed)

    def _accepted(self, tokens, rows: _Rows, width: int, draft_token_ids) -> tuple[torch.Tensor, torch.Tensor]:
        """Each request's tokens, int32 [requests, width], and the batch's row that each was drawn in."""
        device, paths = tokens.device, getattr(self.runner, "sam_paths", None)
        source_rows = torch.arange(len(rows.counts), device=device)[:, None]
        has_paths = paths is not None and paths.rows
        if device.type == "cpu" and not has_paths:  # where ten small operators take as long as a small model's layer
            kept = verify.accept_on_host(tokens.numpy(), draft_token_ids.to(torch.int64).numpy(), rows.counts)
            return torch.from_numpy(kept), source_rows
        places = np.stack([rows.request, rows.offset])
        request, offset = sent(places, device)
        of_draft = sent(places[:, rows.offset < rows.counts[rows.request] - 1], device)
        sampled = torch.full((len(rows.counts), width), verify.PLACEHOLDER, dtype=torch.int64, device=device)
        drafts = torch.full_like(sampled, NO_DRAFT)
        sampled[request, offset] = tokens
        drafts[of_draft[0], of_draft[1]] = draft_token_ids.to(torch.int64)
        kept = verify.accept_matching(sampled, drafts)
        return kept, paths.follow(sampled, drafts, kept) if has_paths else source_rows


@contextlib.contextmanager
def _min_tokens_behind_drafts(metadata, drafted: Sequence[int]):
    """Let stop tokens follow a draft with which a response has its `min_tokens`: `stop_behind_drafts` of PATCHES."""
    processors = [one for one in metadata.logitsprocs.non_argmax_invariant if getattr(one, "min_toks", None)]
    before = [one.logits_slice for one in processors]
    for one in processors:
        early = [
            (row, stop)
            for row, (least, output, stops) in one.min_toks.items()
            if len(output) + drafted[row] < least
            for stop in stops
        ]
        one.logits_slice = tuple(one._device_tensor([pair[i] for pair in early], torch.int32) for i in (0, 1))
    try:
        yield
    finally:
        for one, whole in zip(processors, before, strict=True):
            one.logits_slice = whole


def _is_plain(metadata) -> bool:
    """Whether nothing changes the logits before the temperature."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not any(_active(processor) for processor in metadata.logitsprocs.non_argmax_invariant)
        and (holder is None or not holder.has_tracked_requests())
    )


def _active(processor) -> bool:
    """vLLM's built-in processors are always listed; they say by their state whether a request uses them."""
    if type(processor).__module__ != "vllm.v1.sample.logits_processor.builtin":
        return True
    return bool(getattr(processor, "biases", None) or getattr(processor, "min_toks", None))


def self_check(runner) -> None:
    """Prove that vLLM will call the installed sampler: it calls `self._sample`, and that gives the tokens it must.

    Raises:
        RuntimeError: vLLM samples elsewhere, or known logits give other tokens.
    """
    step = inspect.unwrap(type(runner).sample_tokens)
    if "_sample" not in step.__code__.co_names:
        raise RuntimeError(
            f"{type(runner).__name__}.sample_tokens does not call _sample, which exact verification replaces: "
            "use vLLM 0.23.0"
        )
    kept = runner.input_batch, runner.requests
    drafts, logits, metadata, expected = known_step(runner.device)
    draw = float(uniforms(np.array([rng_key(1, 0, "c")]), np.array([5]))[0])
    expected = [*expected, [2 if draw < 0.5 else 7, -1, -1]]
    request = SimpleNamespace(sampling_params=SimpleNamespace(seed=1), num_tokens=5)
    try:
        runner.requests = dict.fromkeys("abc", request)
        runner.input_batch = SimpleNamespace(
            req_ids=list("abc"), generators={}, sampling_metadata=metadata, update_async_output_token_ids=lambda: None
        )
        found = runner._sample(logits, drafts).sampled_token_ids.tolist()
    finally:
        runner.input_batch, runner.requests = kept
    runner._sample.forget()
    if found != expected:
        raise RuntimeError(f"exact verification's self-check: known logits gave {found}, expected {expected}")
