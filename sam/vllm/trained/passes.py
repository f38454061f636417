"""A draft model's forward passes over the requests that want them, and over the tokens that it missed.

vLLM's own proposer loads the model and owns its KV cache. Its own passes read the tokens of the step that has just
ended, so that it must run in every step. Here the first pass reads whatever the draft model has not written into its
cache yet, and requests that want no draft are left out.
"""

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

from sam import verify
from sam.drafting.written_blocks import WrittenBlocks
from sam.verify.exact import rng_key, sent, uniforms

# Streams of sam.verify.exact.
OF_TARGET = 0
OF_DRAFTS = 1
NO_TOKEN = -1
# Steps whose hidden states may be on their way. The host is at most so far ahead: it waits for no earlier copy.
UNDER_WAY = 2
States = tuple[torch.Tensor, torch.Tensor]
"""Of a pass, for each of its tokens: what logits are computed from, and what the next pass takes."""


class Batch(NamedTuple):
    """The requests of a step that can be drafted for."""

    rows: list[int]  # of the model runner's batch
    ids: list[str]
    lengths: np.ndarray  # int [requests], tokens of each text
    texts: np.ndarray  # int32 [rows or fewer, longest text], by row

    @classmethod
    def of(cls, runner, ids: list[str], texts: list[np.ndarray]) -> Self:
        """With their texts, int32 [length] each."""
        rows = [runner.input_batch.req_id_to_index[name] for name in ids]
        lengths = np.array(list(map(len, texts)))
        table = np.zeros((max(rows) + 1, lengths.max()), np.int32)
        for row, text in zip(rows, texts, strict=True):
            table[row, : len(text)] = text
        return cls(rows, ids, lengths, table)


class Chosen(NamedTuple):
    """Draft tokens, of one pass or, with [rows, passes] in place of [rows], of several."""

    tokens: torch.Tensor  # int64 [rows]; NO_TOKEN where logits were not finite
    probabilities: torch.Tensor | None = None  # float32 [rows, vocabulary], drawn from, where verification asks


def greedy_drafts(logits: torch.Tensor, pass_: int) -> Chosen:
    """Take the likeliest token of each row's logits, [rows, vocabulary], in pass number `pass_` of a step."""
    values, tokens = logits.max(dim=-1)
    return Chosen(tokens.where(torch.isfinite(values), NO_TOKEN))


def drawn_drafts(runner, rows, passes: int, verification: str) -> Callable[[torch.Tensor, int], Chosen]:
    """A function like `greedy_drafts` that draws at the temperatures of rows of the batch, without top-k and top-p; of
    greedy requests it takes the likeliest token. A draw has a uniform of the request's key and the token's position.

    Under exact verification it is the one with which the target's token will be drawn: that is a function of it and the
    target's distribution, whatever was drafted, and draws with one uniform from similar distributions are mostly equal
    (Daliri et al., arXiv 2408.07978; here by inverse CDF). Under rejection sampling a draft has to be independent of
    what decides on it: it has a uniform of its own, and the distribution that it was drawn from goes to verification.
    """
    batch = runner.input_batch
    is_exact = verification == "exact"
    names = [batch.req_ids[row] for row in rows]
    requests = [runner.requests[name] for name in names]
    seed = runner.model_config.seed
    keys = [rng_key(state.sampling_params.seed, seed, name) for state, name in zip(requests, names, strict=True)]
    positions = np.array([request.num_tokens for request in requests])[:, None] + np.arange(passes)
    keys = np.repeat(np.array(keys, np.int64), passes)
    draws = uniforms(keys, positions.ravel(), OF_TARGET if is_exact else OF_DRAFTS).reshape(positions.shape)
    is_greedy = batch.temperature_cpu[rows] == verify.GREEDY
    temperatures = np.where(is_greedy, 1.0, batch.temperature_cpu[rows]).astype(np.float32)
    draws, is_greedy, temperatures = (sent(values, runner.device) for values in (draws, is_greedy, temperatures))

    def draw(logits: torch.Tensor, pass_: int) -> Chosen:
        likeliest, _ = greedy_drafts(logits, pass_)
        scaled = logits.to(torch.float32) / temperatures[:, None]
        is_token = likeliest != NO_TOKEN
        tokens = likeliest.where(is_greedy | ~is_token, verify.sample_inverse_cdf(scaled, draws[:, pass_]))
        # Without a distribution a draft is as if nobody would have drawn it: it is rejected for a plain sample.
        kept = None if is_exact else torch.where(is_token[:, None], scaled.softmax(-1), 0.0)
        return Chosen(tokens, kept)

    return draw


def begin_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the host that is valid once the device has done what it was asked so far."""
    if tensor.device.type == "cpu":
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class ModelPasses:
    """The passes of a language model of its own, which reads nothing but the text.

    Args:
        holder: vLLM's proposer, which holds the model.
        runner: vLLM's model runner.

    Attributes:
        longest_text: tokens beyond which the target or the draft model has no positions.
        written: what its KV cache holds; None before `missing` is asked.
    """

    def __init__(self, holder: Any, runner: Any):
        self.holder = holder
        self.runner = runner
        self.longest_text = min(holder.max_model_len, holder.draft_model_config.max_model_len)
        self.written: WrittenBlocks | None = None
        self._kept_weights: dict[str, torch.Tensor] = {}

    def keep_weights(self, target_model: torch.nn.Module) -> None:
        """Copy the weights to the host, but for those that are the target's, which its weight sync brings.

        Root cause: at sleep level 2, which verl uses, vLLM frees all weights, and the weight sync brings the target's
        only. Symptom: the draft model drafts noise. Can go when vLLM reloads draft models on waking.
        """
        of_target = set(map(id, target_model.state_dict(keep_vars=True).values()))
        own = self.holder.model.state_dict(keep_vars=True).items()
        self._kept_weights = {
            name: weight.detach().to("cpu", copy=True) for name, weight in own if id(weight) not in of_target
        }

    def restore(self) -> None:
        """After a sleep or a weight sync: the weights are as loaded, and the KV cache holds nothing."""
        own = self.holder.model.state_dict()
        for name, value in self._kept_weights.items():
            own[name].copy_(value)
        self.written = None

    def time(self, num_tokens: int) -> None:
        """One pass over `num_tokens` tokens with their logits, without attention, to its end."""
        slots = self.holder._get_slot_mapping(num_tokens)
        context = set_forward_context(None, self.holder.vllm_config, num_tokens=num_tokens, slot_mapping=slots)
        with torch.inference_mode(), context:
            self.holder.model.compute_logits(self._hidden(num_tokens)[0])
        self.runner._sync_device()

    def keep_states(self, hidden_states, aux_hidden_states, step) -> None:
        """Keep what later passes read of the target's step; nothing here."""

    def missing(self, batch: Batch) -> np.ndarray:
        """Tokens that the first pass of each request reads, its last one at least: int64 [requests]."""
        entries, before = self._entries(batch)
        blocks = self._table().get_numpy_array()
        if self.written is None:
            self.written = WrittenBlocks(self._table().block_size)
        written = [
            self.written.written(name, entries.texts[row, :length], blocks[row], token)
            for name, row, length, token in zip(entries.ids, entries.rows, entries.lengths, before, strict=True)
        ]
        return entries.lengths - np.minimum(written, entries.lengths - 1)

    @torch.inference_mode()
    def draft(self, batch: Batch, missing: np.ndarray, count: int) -> Chosen:
        """Draft `count` tokens of each request, one a pass, the first of which reads what `missing` said; the host
        waits for none of them. [requests, count] each, on the device."""
        entries, _ = self._entries(batch)
        choose = self._sampling(batch.rows, count)
        compute_logits = self.holder.model.compute_logits
        last, carried = self._read(entries, missing)
        chosen = [choose(compute_logits(last), 0)]
        for pass_ in range(1, count):
            begins = entries.lengths + (pass_ - 1)
            ids = chosen[-1].tokens.clamp(min=0).to(torch.int32)
            last, carried = self._forward(batch.rows, begins, begins + 1, ids, carried)
            chosen.append(choose(compute_logits(last), pass_))
        tokens, kept = zip(*chosen, strict=True)
        return Chosen(torch.stack(tokens, 1), None if kept[0] is None else torch.stack(kept, 1))

    def _entries(self, batch: Batch) -> tuple[Batch, list[int]]:
        """What the KV cache has entries of: the texts, and the token before each that its entries depend on, or -1."""
        return batch, [-1] * len(batch.ids)

    def _sampling(self, rows, count: int):
        if self.holder.config.draft_sample_method == "greedy":
            return greedy_drafts
        return drawn_drafts(self.runner, rows, count, self.holder.config.verification)

    def _table(self):
        return self.runner.input_batch.block_table[self.holder.kv_cache_gid]

    def _read(self, batch: Batch, missing: np.ndarray) -> States:
        """Write what is missing, in passes of as many tokens as fit; the states at each request's last token."""
        request_of = np.repeat(np.arange(len(missing)), missing)
        positions = np.arange(len(request_of)) + (batch.lengths - np.cumsum(missing))[request_of]
        blocks = self._table().get_numpy_array()
        last = []
        for first in range(0, len(request_of), self.holder.max_num_tokens):
            piece = slice(first, first + self.holder.max_num_tokens)
            requests, starts, counts = np.unique(request_of[piece], return_index=True, return_counts=True)
            rows = batch.rows[requests]
            begins = positions[piece][starts]
            ids = batch.texts[batch.rows[request_of[piece]], positions[piece]].astype(np.int32)
            states = self._forward(rows, begins, begins + counts, sent(ids, self.holder.device))
            for request, begin, end in zip(requests, begins, begins + counts, strict=True):
                self.written.note(batch.ids[request], begin, end, blocks[batch.rows[request]])
            places = np.flatnonzero(positions[piece] == batch.lengths[request_of[piece]] - 1)
            last.append([state[sent(places, self.holder.device)] for state in states])
        for_logits, carried = (torch.cat(parts) for parts in zip(*last, strict=True))
        return for_logits, carried

    def _forward(self, rows, begins, ends, ids: torch.Tensor, carried: torch.Tensor | None = None) -> States:
        """States of the tokens from `begins` to `ends` of each row, whose ids are `ids`, int32 [tokens]."""
        holder = self.holder
        table = self._table()
        counts = ends - begins
        starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        total = int(starts[-1])
        positions = np.arange(total) - np.repeat(starts[:-1] - begins, counts)
        blocks = table.get_numpy_array()[np.repeat(rows, counts), positions // table.block_size]
        slots = torch.from_numpy(blocks.astype(np.int64) * table.block_size + positions % table.block_size)
        lengths = torch.from_numpy(ends.astype(np.int32))
        starts_cpu = torch.from_numpy(starts)
        metadata = CommonAttentionMetadata(
            query_start_loc=sent(starts_cpu, holder.device),
            query_start_loc_cpu=starts_cpu,
            seq_lens=sent(lengths, holder.device),
            _seq_lens_cpu=lengths,
            _num_computed_tokens_cpu=torch.from_numpy(begins.astype(np.int32)),
            seq_lens_cpu_upper_bound=lengths,
            num_reqs=len(rows),
            num_actual_tokens=total,
            max_query_len=int(counts.max()),
            max_seq_len=int(ends.max()),
            block_table_tensor=sent(table.get_numpy_array()[rows], holder.device),
            slot_mapping=sent(slots, holder.device),
        )
        _, of_layers = holder.build_per_group_and_layer_attn_metadata(metadata)
        if holder.pass_hidden_states_to_model:
            self._put_states(slots, carried)
        holder.input_ids[:total] = ids
        holder.positions[:total] = sent(positions, holder.device)
        slot_mapping = holder._get_slot_mapping(total, metadata.slot_mapping)
        graphs = {"cudagraph_runtime_mode": CUDAGraphMode.NONE, "slot_mapping": slot_mapping}
        with set_forward_context(of_layers, holder.vllm_config, num_tokens=total, **graphs):
            return self._hidden(total)

    def _hidden(self, num_tokens: int) -> States:
        """Run the model over what was put into its place."""
        holder = self.holder
        beside = {"inputs_embeds": None}
        if holder.pass_hidden_states_to_model:
            beside = {"hidden_states": holder.hidden_states[:num_tokens]}
        positions = holder._get_positions(num_tokens)
        states = holder.model(input_ids=holder.input_ids[:num_tokens], positions=positions, **beside)
        for_logits, carried = states if isinstance(states, tuple) else (states, states)
        return for_logits[:num_tokens], carried[:num_tokens]


class EaglePasses(ModelPasses):
    """The passes of an EAGLE head, whose entry of a position is made of the target's states there and the token after.

    vLLM has the states of the last step only, and a head that rested missed others. So every step's are kept on the
    host, in a table with a row for each slot of the KV cache: the target writes its keys and values of a token and
    gives its states in one pass, so that a row is of its slot's text, however blocks are shared or handed on.
    """

    def __init__(self, holder: Any, runner: Any):
        super().__init__(holder, runner)
        # [slots, all layers' states], on the host; `torch.empty` takes memory as rows are written.
        self._states: torch.Tensor | None = None
        # Slots and states on their way to the host, and the event of each copy.
        self._arriving: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()

    def keep_states(self, hidden_states, aux_hidden_states, step) -> None:
        """Begin to copy a step's states to the host, drafts or not, rejected tokens' too: their slots are written again
        with the tokens in their place.

        Args:
            hidden_states: [tokens or more, hidden size], of the last layer.
            aux_hidden_states: the same of each layer that the head reads; None if it reads the last one's.
            step: vLLM's CommonAttentionMetadata, with the slot of each token.
        """
        tokens = step.num_actual_tokens
        event = torch.Event()
        states = torch.cat([layer[:tokens] for layer in aux_hidden_states or [hidden_states]], dim=-1)
        self._arriving.append((begin_copy(step.slot_mapping[:tokens]), begin_copy(states), event))
        event.record()
        self._write_states(UNDER_WAY)

    @torch.inference_mode()
    def _write_states(self, under_way: int) -> None:
        """Write the states of all steps but the last `under_way`."""
        while len(self._arriving) > under_way:
            slots, states, event = self._arriving.popleft()
            event.synchronize()
            if self._states is None:
                config = self.runner.kv_cache_config
                spec = config.kv_cache_groups[self.holder.kv_cache_gid].kv_cache_spec
                self._states = torch.empty((config.num_blocks * spec.block_size, states.shape[1]), dtype=states.dtype)
            self._states[slots] = states

    def missing(self, batch: Batch) -> np.ndarray:
        """As a draft model's, of entries; RuntimeError if no step's hidden states could be kept."""
        self._write_states(0)
        if self._states is None:
            raise RuntimeError("the table of hidden states is not there")
        return super().missing(batch)

    def _entries(self, batch: Batch) -> tuple[Batch, list[int]]:
        """The last token has none yet, and the first token is a part of the first one."""
        shifted = batch._replace(lengths=batch.lengths - 1, texts=batch.texts[:, 1:])
        return shifted, batch.texts[batch.rows, 0].tolist()

    def _put_states(self, slots: torch.Tensor, carried: torch.Tensor | None) -> None:
        """Of the slots, int64 [tokens] on the host, or those that the pass before carried."""
        holder = self.holder
        if carried is None:
            self._write_states(0)
            carried = sent(self._states[slots], holder.device)
            if holder.eagle3_use_aux_hidden_state:
                carried = holder.model.combine_hidden_states(carried)
        holder.hidden_states[: len(carried)] = carried
