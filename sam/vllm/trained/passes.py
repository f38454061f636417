"""A draft model's forward passes over the requests that want them, and over the tokens that it missed.

vLLM's own proposer loads the model and owns its KV cache. Its own passes read the tokens of the step that has just
ended, so that it must run in every step. Here the first pass reads whatever the draft model has not written into its
cache yet, and rows that want no draft are left out.
"""

import numpy as np
import torch
from vllm.config import CUDAGraphMode, replace
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

from sam.config import SpeculationConfig
from sam.drafting.written_blocks import WrittenBlocks
from sam.verify.transfer import sent
from sam.vllm.trained.sampling import DrawnDrafts, GreedyDrafts, drawn_drafts

Span = tuple[int, int, int]
"""A row of the batch, and the first and last-but-one token of its text that a pass reads."""

States = tuple[torch.Tensor, torch.Tensor]
"""Of a pass, for each of its tokens: what logits are computed from, and what the next pass takes."""


def split(spans: list[Span], most: int) -> list[list[Span]]:
    """Cut spans into passes of at most `most` tokens, in order; a long span goes on in the next pass.

    Example:
        >>> split([(0, 0, 3), (1, 2, 7)], most=5)
        [[(0, 0, 3), (1, 2, 4)], [(1, 4, 7)]]
    """
    passes: list[list[Span]] = [[]]
    room = most
    for row, begin, end in spans:
        while begin < end:
            if room == 0:
                passes.append([])
                room = most
            cut = min(end, begin + room)
            passes[-1].append((row, begin, cut))
            room -= cut - begin
            begin = cut
    return passes


def begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is valid once the device has done what it was asked so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class CachedPasses:
    """The passes of one of vLLM's proposers with a model, a base after this one, for some rows in some steps.

    Attributes:
        written: what its KV cache holds; None before `missing` is asked for the first time, which is asked of the first
            tensor-parallel rank only.
    """

    def _prepare(self, runner) -> None:
        self.runner = runner
        self.speculation = SpeculationConfig.from_vllm(self.vllm_config)
        self.written: WrittenBlocks | None = None
        self.is_measuring = False
        self._kept_weights: dict[str, torch.Tensor] = {}

    def _create_draft_vllm_config(self):
        """With the weights of its folder.

        Root cause: vLLM 0.23 loads a draft model as the target is loaded, which verl asks to be filled with random
        numbers, as a weight sync follows. Symptom: no draft is ever accepted. Can go when vLLM heeds
        `draft_load_config` for draft models, and sets it for EAGLE's.
        """
        base = super()._create_draft_vllm_config()
        return replace(base, load_config=replace(base.load_config, load_format="auto"))

    def load_draft_model(self, target_model: torch.nn.Module) -> None:
        """Load the weights; a copy stays on the host where sleeping would lose them.

        Root cause: at sleep level 2, which verl uses, vLLM frees all weights, and the weight sync brings the target's
        only. Symptom: the draft model drafts noise. Can go when vLLM reloads draft models on waking.
        """
        SpecDecodeBaseProposer.load_model(self, target_model)
        if self.vllm_config.model_config.enable_sleep_mode:
            self.keep_weights(target_model)

    def keep_weights(self, target_model: torch.nn.Module) -> None:
        """Copy the weights to the host, but for those that are the target's, which its weight sync brings."""
        of_target = {id(value) for value in target_model.state_dict(keep_vars=True).values()}
        own = self.model.state_dict(keep_vars=True).items()
        self._kept_weights = {
            name: value.detach().to("cpu", copy=True) for name, value in own if id(value) not in of_target
        }

    def restore(self) -> None:
        """After a sleep or a weight sync: the weights are as loaded, and the KV cache holds nothing."""
        for name, value in self.model.state_dict().items():
            if name in self._kept_weights:
                value.copy_(self._kept_weights[name])
        if self.written is not None:
            self.written.clear()

    def dummy_run(self, num_tokens: int, *arguments, **keywords) -> None:
        """vLLM's, to measure memory; nothing while the target alone is timed."""
        if not self.is_measuring:
            super().dummy_run(num_tokens, *arguments, **keywords)

    def time_pass(self, num_tokens: int) -> None:
        """One pass over `num_tokens` tokens with their logits, without attention, to its end."""
        with (
            torch.inference_mode(),
            set_forward_context(
                None, self.vllm_config, num_tokens=num_tokens, slot_mapping=self._get_slot_mapping(num_tokens)
            ),
        ):
            self.model.compute_logits(self._hidden(num_tokens)[0])
        self.runner._sync_device()

    def _hidden(self, num_tokens: int) -> States:
        hidden = self.model(
            input_ids=self.input_ids[:num_tokens], positions=self._get_positions(num_tokens), inputs_embeds=None
        )
        return hidden[:num_tokens], hidden[:num_tokens]

    def _take_states(self, slots: torch.Tensor, carried: torch.Tensor | None) -> None:
        """Put what a pass reads beside token ids into its place; for a model of its own that is nothing.

        Args:
            slots: int64 [tokens], where in the KV cache each token goes; on the host.
            carried: what the pass before gave for these tokens; None if the target has computed them.
        """

    def _table(self):
        return self.runner.input_batch.block_table[self.kv_cache_gid]

    def missing(self, request_ids, rows: list[int], lengths: np.ndarray, texts: np.ndarray, before=None) -> np.ndarray:
        """Tokens that the first pass of each row reads: at least its last one.

        Args:
            request_ids: of the rows.
            rows: rows of the model runner's batch.
            lengths: int [rows], tokens of each text.
            texts: int32 [batch, max_model_len], the batch's tokens.
            before: int [rows], the token before each text, if its entries in the KV cache depend on one.

        Returns:
            int64 [rows].
        """
        table = self._table()
        if self.written is None:
            self.written = WrittenBlocks(table.block_size)
        blocks = table.get_numpy_array()
        before = [-1] * len(rows) if before is None else before.tolist()
        found = [
            self.written.written(name, texts[row, :length], blocks[row], token)
            for name, row, length, token in zip(request_ids, rows, lengths.tolist(), before, strict=True)
        ]
        return lengths - np.minimum(found, lengths - 1)

    @torch.inference_mode()
    def draft(self, request_ids, rows, lengths, missing, texts, count: int) -> tuple[torch.Tensor | None, ...]:
        """Draft one token a pass. The host waits for none of them.

        Args:
            request_ids, rows, lengths, texts: as in `missing`, which gave `missing`.
            count: draft tokens of each row.

        Returns:
            int64 [rows, count], token ids; bool [rows, count], whether each came from finite logits; and float32 [rows,
            count, vocabulary] that they were drawn from, or None where nobody asks; all on the device.
        """
        sampling = self._draft_sampling(rows, count)
        last, carried = self._read(request_ids, rows, lengths, missing, texts)
        chosen = [sampling.choose(self.model.compute_logits(last), 0)]
        for pass_ in range(1, count):
            ends = lengths + pass_
            ids = chosen[-1].tokens.to(torch.int32)
            last, carried = self._forward(np.asarray(rows), ends - 1, ends, ids, carried)
            chosen.append(sampling.choose(self.model.compute_logits(last), pass_))
        tokens, finite, probabilities = zip(*chosen, strict=True)
        kept = None if probabilities[0] is None else torch.stack(probabilities, 1)
        return torch.stack(tokens, 1), torch.stack(finite, 1), kept

    def _draft_sampling(self, rows: list[int], count: int) -> GreedyDrafts | DrawnDrafts:
        config, ranks = self.speculation, self.vllm_config.parallel_config.tensor_parallel_size
        # What drafts were drawn from would have to be known on all ranks, where only the first knows which it took.
        if config.draft_sample_method == "greedy" or (config.verification != "exact" and ranks > 1):
            return GreedyDrafts()
        return drawn_drafts(self.runner, rows, count, config.verification, self.device)

    def _read(self, request_ids, rows, lengths, missing, texts) -> States:
        """Write what is missing; the states at each row's last token, in the order of the rows."""
        table = self._table()
        blocks, names = table.get_numpy_array(), dict(zip(rows, request_ids, strict=True))
        spans = [
            (row, length - lacking, length)
            for row, length, lacking in zip(rows, lengths.tolist(), missing.tolist(), strict=True)
        ]
        length_of, last = dict(zip(rows, lengths.tolist(), strict=True)), {}
        for one in split(spans, self.max_num_tokens):
            chosen, begins, ends = (np.array(column) for column in zip(*one, strict=True))
            ids = np.concatenate([texts[row, begin:end] for row, begin, end in one]).astype(np.int32)
            states = self._forward(chosen, begins, ends, sent(torch.from_numpy(ids), self.device))
            at = np.cumsum(ends - begins) - 1
            for (row, begin, end), index in zip(one, at.tolist(), strict=True):
                if self.written is not None:
                    self.written.note(names[row], begin, end, blocks[row])
                if end == length_of[row]:
                    last[row] = [one[index] for one in states]
        for_logits, carried = (torch.stack(parts) for parts in zip(*(last[row] for row in rows), strict=True))
        return for_logits, carried

    def _forward(
        self, rows: np.ndarray, begins: np.ndarray, ends: np.ndarray, ids: torch.Tensor, carried=None
    ) -> States:
        """States of the tokens from `begins` to `ends` of each row, whose ids are `ids`, int32 [tokens]."""
        table, counts = self._table(), ends - begins
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        total = int(starts[-1])
        positions = np.arange(total) - np.repeat(starts[:-1] - begins, counts)
        blocks = table.get_numpy_array()[np.repeat(rows, counts), positions // table.block_size]
        slots = torch.from_numpy(blocks.astype(np.int64) * table.block_size + positions % table.block_size)
        lengths, starts_cpu = torch.from_numpy(ends.astype(np.int32)), torch.from_numpy(starts)
        metadata = CommonAttentionMetadata(
            query_start_loc=sent(starts_cpu, self.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=sent(lengths, self.device),
            _seq_lens_cpu=lengths,
            _num_computed_tokens_cpu=torch.from_numpy(begins.astype(np.int32)),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(rows),
            num_actual_tokens=total,
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=sent(torch.from_numpy(table.get_numpy_array()[rows]), self.device),
            slot_mapping=sent(slots, self.device),
        )
        _, of_layers = self.build_per_group_and_layer_attn_metadata(metadata)
        self._take_states(slots, carried)
        self.input_ids[:total] = ids
        self.positions[:total] = sent(torch.from_numpy(positions), self.device)
        with set_forward_context(
            of_layers,
            self.vllm_config,
            num_tokens=total,
            cudagraph_runtime_mode=CUDAGraphMode.NONE,
            slot_mapping=self._get_slot_mapping(total, metadata.slot_mapping),
        ):
            return self._hidden(total)


class DraftModelPasses(CachedPasses, DraftModelProposer):
    """Those of a language model of its own, which reads nothing but the text."""

    def _raise_if_padded_drafter_batch_disabled(self) -> None:
        """vLLM's own passes need a padded batch; these take tokens from the host."""
