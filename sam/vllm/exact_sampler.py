"""Exact-match sampling in vLLM's model runner, for every step, with and without drafts."""

from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple, Self

import numpy as np
import torch
from torch.nn.functional import pad
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor, MinTokensLogitsProcessor
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

from sam import verify
from sam.verify.exact import rng_key, sent, uniforms

NO_DRAFT = -2  # equal to no token and not to the placeholder
# vLLM's own processors are always listed; these attributes say whether a request uses them.
USED_IF = {MinTokensLogitsProcessor: "min_toks", LogitBiasLogitsProcessor: "biases"}


class _Rows(NamedTuple):
    """Where each row of a step's logits belongs: rows of a request stand together, drafts first, bonus last."""

    counts: np.ndarray  # int64 [requests], rows of each request
    request: np.ndarray  # int64 [rows]
    offset: np.ndarray  # int64 [rows], position within the request

    def repeat(self, values):
        """[requests] of numpy or torch to [rows]: each request's value for each of its rows."""
        if len(self.request) == len(self.counts):
            return values
        return values[self.request if isinstance(values, np.ndarray) else sent(self.request, values.device)]

    @classmethod
    def of(cls, num_draft_tokens: list[int]) -> Self:
        counts = 1 + np.asarray(num_draft_tokens, dtype=np.int64)
        request = np.repeat(np.arange(len(counts)), counts)
        return cls(counts, request, np.arange(len(request)) - (np.cumsum(counts) - counts)[request])


def requests_of_rows(runner) -> list[str]:
    """The request that each row of the batch belongs to: further paths have rows of their own."""
    ids = runner.input_batch.req_ids
    paths = getattr(runner, "sam_paths", None)
    return ids if paths is None else [paths.owner_of(name) for name in ids]


def fill_last_placeholder(runner) -> None:
    """Put the tokens that the step before sampled into the requests' outputs, as penalties need it.

    Root cause: InputBatch.update_async_output_token_ids does so only while a request with penalties is in the batch. It
    takes all placeholders at an output's end for the last step's, and cuts off those beyond its tokens.
    Symptom: when such a request joins, all others forget how many tokens they have, and exact verification draws their
    next ones as if at an earlier position. Can go when vLLM fills the last ones.
    """
    batch = runner.input_batch
    outputs = batch.sampling_metadata.output_token_ids
    lengths = [len(output) for output in outputs]
    batch.update_async_output_token_ids()
    for output, length in zip(outputs, lengths, strict=True):
        if missing := length - len(output):
            output[-1:-1] = [-1] * missing


class ExactSampler:
    """Replaces `GPUModelRunner._sample` on one model runner.

    Positions count from the prompt's first token: batching and preemption change nothing, nor where a seeded response
    is cut and goes on as a new request, whose prompt ends with the tokens so far.
    """

    def __init__(self, runner):
        self.runner = runner
        self._rng_keys: dict[str, int] = {}
        self._masked = None  # the metadata whose mask is right

    def __call__(self, logits: torch.Tensor, spec_decode_metadata) -> SamplerOutput:
        batch = self.runner.input_batch
        drafts = spec_decode_metadata
        # Seeded requests' generators are not used; with them vLLM fails on CPU where a prompt comes in pieces
        # ("CPU Generator does not use offset", gpu_model_runner.py, _bookkeeping_sync).
        batch.generators.clear()
        fill_last_placeholder(self.runner)
        metadata = batch.sampling_metadata
        if metadata.allowed_token_ids_mask is not None and metadata is not self._masked:
            self._mask(metadata.allowed_token_ids_mask)
            self._masked = metadata
        rows = _Rows.of(drafts.num_draft_tokens if drafts is not None else [0] * len(batch.req_ids))
        # vllm-ascend pads rows where its output layer is spread over ranks.
        logits = logits[: len(rows.request)].to(torch.float32)
        mode = None
        if metadata.max_num_logprobs is not None or metadata.logprob_token_ids:
            # The engine's setting: vllm-ascend's own sampler does not know it and always gives raw ones.
            mode = getattr(self.runner.model_config, "logprobs_mode", self.runner.sampler.logprobs_mode)
        processed = self._process(logits, rows, metadata, drafts, is_read_later=(mode or "").startswith("raw"))
        tokens = self.draw(processed, rows, metadata)
        listed = None
        if mode is not None:
            values = processed if mode.startswith("processed") else logits
            values = values if mode.endswith("logits") else self.runner.sampler.compute_logprobs(values)
            listed = self._logprobs(values, tokens, rows, metadata)
        if drafts is None or (width := int(rows.counts.max())) == 1:
            return SamplerOutput(sampled_token_ids=tokens.to(torch.int32)[:, None], logprobs_tensors=listed)
        return self._verified(tokens, listed, rows, width, drafts.draft_token_ids)

    def _mask(self, mask: torch.Tensor) -> None:
        """Forbid each request, bool [requests, vocabulary], what is not in its `allowed_token_ids`.

        Root cause: where a request has moved to another row, vLLM before 0.32 leaves its mask behind, for whoever comes
        there next, and of two that change places one gets the other's and the other keeps it (gpu_input_batch.py,
        `condense` and `swap_states`). Can go when: vLLM 0.32, which mends both.
        """
        forbidden = np.zeros(mask.shape, dtype=bool)
        for row, request_id in enumerate(requests_of_rows(self.runner)):
            if allowed := self.runner.requests[request_id].sampling_params.allowed_token_ids:
                forbidden[row] = True
                forbidden[row, allowed] = False
        mask.copy_(sent(forbidden, mask.device))

    def _process(self, logits, rows: _Rows, metadata, drafts, is_read_later: bool) -> torch.Tensor:
        """Masks, penalties, temperature, top-k and top-p as vLLM applies them, for all rows alike; in place of
        `logits`, unless they are read later."""
        processed = logits if _is_plain(metadata) else self._masked_and_penalised(logits.clone(), metadata, drafts)
        if metadata.all_greedy:
            return processed
        temperature = rows.repeat(metadata.temperature)[:, None]
        if not metadata.all_random:
            temperature = torch.where(temperature == verify.GREEDY, 1.0, temperature)
        # Another copy of the logits takes as long as drawing from them.
        is_kept = processed is logits and is_read_later
        processed = processed / temperature if is_kept else processed.div_(temperature)
        # Min-p: vLLM refuses it with a speculative_config, so there is one row for each request.
        for processor in metadata.logitsprocs.argmax_invariant:
            processed = processor.apply(processed)
        if metadata.top_k is None and metadata.top_p is None:
            return processed
        top_k, top_p = (x if x is None else rows.repeat(x) for x in (metadata.top_k, metadata.top_p))
        # vllm-ascend's sampler brings its own function: vLLM's Triton kernel is not for that device.
        own = getattr(self.runner.sampler.topk_topp_sampler, "apply_top_k_top_p", None)
        if own is None and top_p is not None:
            # Root cause: apply_top_k_top_p_pytorch cuts tokens whose probability is 0 in float32 from rows without a
            # top-p too, if a neighbour has one. Can go when it leaves these alone, as vLLM's Triton kernel does.
            top_p = torch.where(top_p < 1, top_p, 2.0)
        return (own or apply_top_k_top_p)(processed, top_k, top_p)

    def _masked_and_penalised(self, logits, metadata, drafts) -> torch.Tensor:
        """`logits` is changed in place."""
        sampler = self.runner.sampler
        if drafts is None:
            return sampler.apply_logits_processors(logits, metadata, False)
        # As if each request had a draft more, so that its last row is one of a draft too: in vLLM's rule for that row
        # `min_tokens` counts the tokens before the step.
        specs = metadata.spec_token_ids
        holder = metadata.thinking_budget_state_holder
        if holder is not None and holder.has_tracked_requests():
            texts = [[*output, *draft] for output, draft in zip(metadata.output_token_ids, specs, strict=False)]
            holder.update_state(texts, specs)
        further = replace(metadata, spec_token_ids=[[*draft, NO_DRAFT] for draft in specs])
        numbers = [1 + count for count in drafts.num_draft_tokens]
        ends = sent(np.cumsum(numbers, dtype=np.int32), logits.device)  # which only vllm-ascend's reads
        counts = SimpleNamespace(num_draft_tokens=numbers, cu_num_draft_tokens=ends)
        return self.runner.rejection_sampler.apply_logits_processors(logits, further, counts)

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
        """RNG key and next position of every request in the batch, int64 [requests] each: with asynchronous scheduling
        the output holds a placeholder for every token under way, so its length is right."""
        runner = self.runner
        if len(self._rng_keys) > 2 * len(runner.requests) + 1024:
            self._rng_keys = {name: key for name, key in self._rng_keys.items() if name in runner.requests}
        requests = requests_of_rows(runner)
        rng_keys, positions = np.empty((2, len(requests)), dtype=np.int64)
        for row, request_id in enumerate(requests):
            request = runner.requests[request_id]
            key = self._rng_keys.get(request_id)
            if key is None:
                seed = request.sampling_params.seed
                key = self._rng_keys[request_id] = rng_key(seed, runner.model_config.seed, request_id)
            rng_keys[row] = key
            positions[row] = request.num_tokens
        return rng_keys, positions

    def _logprobs(self, values, tokens, rows: _Rows, metadata) -> LogprobsTensors:
        """Of each row, from `values`, float [rows, vocabulary], what its request asks for: tokens by name, or the
        likeliest.

        Root cause: vLLM 0.23's Sampler.forward gives all rows the columns of named tokens, so that others lose their
        likeliest ones and get token 0 with -inf. Can go when it gives each row its own, as the second runner does.
        """
        sampler = self.runner.sampler
        asked = metadata.logprob_token_ids
        likeliest = sampler.gather_logprobs(values, metadata.max_num_logprobs or 0, tokens)
        if not asked:
            return likeliest
        named = {row: asked[request] for row, request in enumerate(rows.request.tolist()) if request in asked}
        chosen = sampler.gather_specific_token_logprobs(values, named, tokens)
        is_named = sent(np.isin(rows.request, list(asked)), tokens.device)[:, None]
        width = max(likeliest.logprobs.shape[1], chosen.logprobs.shape[1])

        def each(column: str) -> torch.Tensor:
            both = getattr(chosen, column), getattr(likeliest, column)
            return torch.where(is_named, *(pad(entries, (0, width - entries.shape[1])) for entries in both))

        ranks = likeliest.selected_token_ranks
        return LogprobsTensors(each("logprob_token_ids"), each("logprobs"), ranks)

    def _verified(self, tokens, listed, rows: _Rows, width: int, draft_token_ids) -> SamplerOutput:
        device = tokens.device
        paths = getattr(self.runner, "sam_paths", None)
        place = rows.request * width + rows.offset
        is_draft = rows.offset < rows.counts[rows.request] - 1
        sampled = torch.full((len(rows.counts), width), verify.PLACEHOLDER, dtype=torch.int64, device=device)
        drafts = torch.full_like(sampled, NO_DRAFT)
        sampled.view(-1)[sent(place, device)] = tokens
        drafts.view(-1)[sent(place[is_draft], device)] = draft_token_ids.to(torch.int64)
        kept = verify.accept_matching(sampled, drafts)
        source_rows = torch.arange(len(rows.counts), device=device)[:, None]  # of the batch: where each was drawn
        if paths is not None and paths.rows:
            source_rows = paths.follow(sampled, drafts, kept)
        if listed is not None:
            # vLLM filters a [requests x width] list by the placeholders; rows beyond a request's own are dropped there.
            starts = sent(np.cumsum(rows.counts) - rows.counts, device)
            index = starts[source_rows] + torch.arange(width, device=device)
            index = index.clamp(max=len(rows.request) - 1).ravel()
            columns = listed.logprob_token_ids, listed.logprobs, listed.selected_token_ranks
            listed = LogprobsTensors(*(column[index] for column in columns))
        return SamplerOutput(sampled_token_ids=kept, logprobs_tensors=listed)


def _is_plain(metadata) -> bool:
    """Whether nothing changes the logits before the temperature."""
    holder = metadata.thinking_budget_state_holder
    return (
        metadata.no_penalties
        and metadata.allowed_token_ids_mask is None
        and not metadata.bad_words_token_ids
        and not any(
            getattr(processor, USED_IF.get(type(processor), ""), True)
            for processor in metadata.logitsprocs.non_argmax_invariant
        )
        and (holder is None or not holder.has_tracked_requests())
    )


def self_check(device: torch.device) -> None:
    """Prove that the engine's device draws and verifies as it must; RuntimeError if known logits give other tokens."""
    expected = [3, 600, 4999]  # as likely as each other, and all that is
    logits = torch.full((3, 5000), -1e4)
    logits[:, expected] = 0.0
    draws = sent(torch.tensor([1 / 6, 1 / 2, 5 / 6], dtype=torch.float64), torch.device(device))
    drawn = verify.sample_inverse_cdf(logits.to(device), draws)
    drafts = torch.tensor([[3, 7, NO_DRAFT]], device=device)
    kept = verify.accept_matching(drawn[None], drafts).tolist()
    if drawn.tolist() != expected or kept != [[3, 600, verify.PLACEHOLDER]]:
        raise RuntimeError(f"exact verification's self-check: known logits gave {drawn.tolist()}, kept {kept}")
