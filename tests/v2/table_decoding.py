"""Requests decoded by vLLM's Sampler of the second runner from a table of logits, with drafts and without."""

import numpy as np
import torch

PROMPT_LENGTH = 4
POSITIONS = 64


class Decoder:
    """Keeps the states that the runner keeps, and updates them with the runner's own kernels.

    Args:
        settings: of SamplingParams, one for each request.
        k: draft tokens of a request at most.
        same_prompt: whether all requests have one.

    Attributes:
        accepted: draft tokens so far.
        logprobs: of requests that ask for them: token ids and values, entry by entry.
    """

    def __init__(self, settings, k, vocabulary=64, logprobs_mode="raw_logprobs", same_prompt=False):
        from vllm import SamplingParams
        from vllm.config import VllmConfig
        from vllm.v1.worker.gpu.sample.sampler import Sampler
        from vllm.v1.worker.gpu.states import RequestState

        from sam.vllm.v2.verification import ExactVerification

        device, self.k, self.number, self.vocabulary = torch.device("cpu"), k, len(settings), vocabulary
        generator = torch.Generator().manual_seed(0)
        self.table = 2.5 * torch.randn(POSITIONS, vocabulary, vocabulary, generator=generator)
        self.states = RequestState(self.number, POSITIONS, 4096, k, vocabulary, device)
        self.sampler = Sampler(
            VllmConfig(), self.number, vocabulary, device, self.states, logprobs_mode, num_speculative_tokens=k + 1
        )
        self.verification = ExactVerification(self.sampler, k, device)
        self.indices, self.accepted, self.logprobs = [], 0, {}
        for row, own in enumerate(settings):
            parameters = SamplingParams(**{"temperature": 1.0, "max_tokens": POSITIONS} | own)
            self.prompt = [(7 * (0 if same_prompt else row) + place) % vocabulary for place in range(PROMPT_LENGTH)]
            self.states.add_request(str(row), PROMPT_LENGTH, self.prompt, 0, POSITIONS)
            index = self.states.req_id_to_index[str(row)]
            self.indices.append(index)
            self.states.last_sampled_tokens[index] = self.prompt[-1]
            self.sampler.add_request(index, parameters)
        self.states.apply_staged_writes()
        self.sampler.apply_staged_writes()
        # All but the prompt's last token are computed.
        self.states.num_computed_tokens.gpu[:] = PROMPT_LENGTH - 1

    def distribution(self, token: int, position: int) -> np.ndarray:
        """Of the token behind one at a position, at T=1."""
        return self.table[position, token].double().softmax(-1).numpy()

    def decode(self, length, drafts=None, right=0.0, ragged=False) -> list[list[int]]:
        """`length` tokens of each request; of `drafts`, the expected ones, a share `right` is left as it is."""
        generator = np.random.default_rng(0)
        texts: list[list[int]] = [[] for _ in range(self.number)]
        while rows := [row for row in range(self.number) if len(texts[row]) < length]:
            proposed = []
            for row in rows:
                number = min(self.k, length - len(texts[row]) - 1) if drafts else 0
                if ragged:
                    number = int(generator.integers(0, number + 1))
                begin = len(texts[row])
                proposed.append(
                    [
                        token if generator.random() < right else int(generator.integers(self.vocabulary))
                        for token in (drafts[row][begin : begin + number] if drafts else [])
                    ]
                )
            for row, tokens in zip(rows, self._step(rows, proposed), strict=True):
                texts[row].extend(tokens)
        return texts

    def _step(self, rows, proposed) -> list[list[int]]:
        from vllm.v1.worker.gpu.input_batch import post_update

        batch = self._batch(rows, proposed)
        logits = self.table[batch.positions, batch.input_ids].clone()
        draws = self.verification if batch.num_draft_tokens else self.sampler
        output = draws(logits, batch)
        post_update(
            batch.idx_mapping,
            self.states.num_computed_tokens.gpu,
            self.states.last_sampled_tokens,
            self.sampler.penalties_state.output_bin_counts,
            output.sampled_token_ids,
            output.num_sampled,
            output.num_rejected,
            batch.query_start_loc,
            self.states.all_token_ids.gpu,
            self.states.total_len.gpu,
        )
        counts = output.num_sampled.tolist()
        self.accepted += sum(counts) - len(rows)
        self._keep_logprobs(rows, batch, counts, output.logprobs_tensors)
        return [tokens[:count] for tokens, count in zip(output.sampled_token_ids.tolist(), counts, strict=True)]

    def _keep_logprobs(self, rows, batch, counts, tensors) -> None:
        if tensors is None:
            return
        for row, begin, count in zip(rows, batch.cu_num_logits_np.tolist(), counts, strict=False):
            for place in range(begin, begin + count):
                entry = tensors.logprob_token_ids[place].numpy().copy(), tensors.logprobs[place].numpy().copy()
                self.logprobs.setdefault(row, []).append(entry)

    def _batch(self, rows, proposed):
        from vllm.v1.worker.gpu.input_batch import InputBatch, InputBuffers

        counts = np.array([1 + len(draft) for draft in proposed], np.int32)
        begins = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        total = int(begins[-1])
        index = torch.tensor([self.indices[row] for row in rows])
        places = torch.cat([torch.arange(count) for count in counts.tolist()]).to(torch.int32)
        computed = self.states.num_computed_tokens.gpu[index]
        lasts = self.states.last_sampled_tokens[index, 0].tolist()
        batch = InputBatch.make_dummy(len(rows), total, InputBuffers(self.number, max(total, self.number), "cpu"))
        owners = torch.repeat_interleave(torch.arange(len(rows)), torch.from_numpy(counts).long())
        batch.idx_mapping, batch.idx_mapping_np = index, index.numpy()
        batch.expanded_idx_mapping, batch.expanded_local_pos = index[owners], places
        batch.num_draft_tokens, batch.num_draft_tokens_per_req = total - len(rows), counts - 1
        batch.cu_num_logits_np, batch.cu_num_logits = begins, torch.from_numpy(begins)
        batch.query_start_loc, batch.logits_indices = torch.from_numpy(begins), torch.arange(total)
        batch.positions = (computed[owners] + places).long()
        inputs = [token for last, draft in zip(lasts, proposed, strict=True) for token in (last, *draft)]
        batch.input_ids = torch.tensor(inputs, dtype=torch.int32)
        batch.seq_lens = computed + torch.from_numpy(counts)
        batch.seq_lens_cpu_upper_bound = batch.seq_lens.clone()
        return batch
