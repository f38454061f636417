"""Exact-match sampling for every step of vLLM's model runner."""

from __future__ import annotations

import numpy as np
import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput

from sam.keys import sample_key, uniforms


class ExactSampler:
    def __init__(self, runner):
        self.runner = runner
        self.engine_seed = runner.model_config.seed
        self.keys: dict[str, int] = {}

    def __call__(self, logits, spec_decode_metadata):
        runner = self.runner
        batch = runner.input_batch
        metadata = batch.sampling_metadata
        rows = len(batch.req_ids)
        counts = np.ones(rows, dtype=np.int64)
        if spec_decode_metadata is not None:
            counts += np.asarray(spec_decode_metadata.num_draft_tokens)
        keys, positions = self._identity(batch.req_ids)
        row_of = np.repeat(np.arange(rows), counts)
        starts = np.cumsum(counts) - counts
        offset = np.arange(len(row_of)) - starts[row_of]
        u = torch.from_numpy(uniforms(keys[row_of], positions[row_of] + offset))
        logits = logits.to(torch.float32)
        processed = logits
        greedy = None
        if not metadata.all_greedy:
            temperature = metadata.temperature
            if not metadata.all_random:
                greedy = (temperature == 0)[row_of] if spec_decode_metadata is not None else temperature == 0
                temperature = torch.where(temperature == 0, 1.0, temperature)
            if spec_decode_metadata is not None:
                temperature = temperature[torch.from_numpy(row_of)]
            processed = logits / temperature[:, None]
            cdf = processed.softmax(-1, dtype=torch.float64).cumsum(-1)
            tokens = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1)
            tokens.clamp_(max=logits.shape[1] - 1)
            if greedy is not None:
                tokens = torch.where(greedy, logits.argmax(-1), tokens)
        else:
            tokens = logits.argmax(-1)
        logprobs = None
        mode = runner.sampler.logprobs_mode
        if metadata.max_num_logprobs is not None:
            source = processed if mode.startswith("processed") else logits
            full = source.log_softmax(-1)
            gathered = runner.sampler.gather_logprobs(full, metadata.max_num_logprobs, tokens)
        width = int(counts.max())
        if width == 1:
            out = tokens.to(torch.int32)[:, None]
            if metadata.max_num_logprobs is not None:
                logprobs = gathered
            return SamplerOutput(sampled_token_ids=out, logprobs_tensors=logprobs)
        out = torch.full((rows, width), -1, dtype=torch.int32)
        grid = torch.full((rows, width), -1, dtype=torch.int64)
        r, o = torch.from_numpy(row_of), torch.from_numpy(offset)
        grid[r, o] = tokens
        drafts = torch.full((rows, width), -2, dtype=torch.int64)
        is_draft = torch.from_numpy(offset < counts[row_of] - 1)
        drafts[r[is_draft], o[is_draft]] = spec_decode_metadata.draft_token_ids.to(torch.int64)
        accepted = (grid == drafts).to(torch.int64).cumprod(1)
        keep = torch.cat([torch.ones(rows, 1, dtype=torch.int64), accepted[:, :-1]], 1).bool() & (grid >= 0)
        out[keep] = grid[keep].to(torch.int32)
        if metadata.max_num_logprobs is not None:
            index = torch.from_numpy(np.minimum(starts[:, None] + np.arange(width), len(row_of) - 1).ravel())
            logprobs = LogprobsTensors(
                gathered.logprob_token_ids[index], gathered.logprobs[index], gathered.selected_token_ranks[index]
            )
        return SamplerOutput(sampled_token_ids=out, logprobs_tensors=logprobs)

    def _identity(self, ids):
        requests = self.runner.requests
        keys = np.empty(len(ids), dtype=np.int64)
        positions = np.empty(len(ids), dtype=np.int64)
        if len(self.keys) > 4 * len(requests) + 1024:
            self.keys = {}
        for i, request_id in enumerate(ids):
            request = requests[request_id]
            key = self.keys.get(request_id)
            if key is None:
                key = sample_key(request.sampling_params.seed, self.engine_seed, request_id)
                self.keys[request_id] = key
            keys[i] = key
            positions[i] = len(request.output_token_ids)
        return keys, positions
