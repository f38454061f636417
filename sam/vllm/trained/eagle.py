"""An EAGLE3 head under the switch: a draft model whose KV cache is made of the target's hidden states.

vLLM's method `eagle3` reads the hidden states of the step that has just ended, and nothing has those of a step in which
the head rested. Here every step's are kept on the host, in a table with a row for each slot of the KV cache: the target
writes its keys and values of a token and gives its hidden states in one pass, so that a row is of the same text as its
slot, however blocks are shared, handed on or evicted. A head that comes back reads what it missed from there.
"""

import logging
from collections import deque
from typing import Any

import torch
from vllm.v1.spec_decode.eagle import EagleProposer

from sam.verify.transfer import sent
from sam.vllm import patches
from sam.vllm.trained.passes import CachedPasses, States, begin_copy
from sam.vllm.trained.proposer import SwitchedDraftModel

logger = logging.getLogger(__name__)


class EaglePasses(CachedPasses, EagleProposer):
    """The passes of an EAGLE head. Its entry of a position is made of the target's states there and the token after.

    Attributes:
        states: [slots of the KV cache, all layers' states], of the target's dtype, on the host; None before the first
            step. `torch.empty` takes memory as rows are written.
    """

    def _prepare(self, runner) -> None:
        super()._prepare(runner)
        self.states: torch.Tensor | None = None
        # Slots and states on their way to the host, and the event of each copy.
        self._arriving: deque[tuple[torch.Tensor, torch.Tensor, Any]] = deque()

    def initialize_attn_backend(self, kv_cache_config, kernel_block_sizes=None) -> None:
        """As vLLM's; the table of states is as long as this KV cache.

        The runner calls no proposer in a step where one request has no room for a whole draft, and the states of all
        requests would be lost. Drafts are cut to the room of each here, so that it may always call.
        """
        super().initialize_attn_backend(kv_cache_config, kernel_block_sizes)
        patches.put(self.runner, "effective_drafter_max_model_len", "draft_near_end", 2 * self.max_model_len)
        group = kv_cache_config.kv_cache_groups[self.kv_cache_gid]
        self._slots, self.states = kv_cache_config.num_blocks * group.kv_cache_spec.block_size, None

    def keep_states(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep a step's.

        Args:
            slots: int64 [tokens or more], where in the KV cache the step wrote each token.
            states: [tokens, all layers' states], of the target's layers that the head reads.
        """
        if self.states is None:
            self.states = torch.empty((self._slots, states.shape[1]), dtype=states.dtype)
        self.states[slots[: len(states)].cpu()] = states.cpu()

    def keep_states_later(self, slots: torch.Tensor, states: torch.Tensor) -> None:
        """As `keep_states`, but for the wait: what has come is written here, or when a pass needs it."""
        self._take_arrived_states(wait=False)
        event = torch.Event()
        copies = [begin_copy(one) for one in (slots[: len(states)], states)]
        event.record()
        self._arriving.append((*copies, event))

    def _take_arrived_states(self, wait: bool) -> None:
        """Write states whose copy is over, and with `wait` all."""
        while self._arriving and (wait or self._arriving[0][-1].query()):
            slots, states, event = self._arriving.popleft()
            event.synchronize()
            self.keep_states(slots, states)

    def missing(self, request_ids, rows, lengths, texts, before=None):
        """As CachedPasses', of entries: the last token has none yet, and the first token is a part of the first one.

        Raises:
            RuntimeError: no step's hidden states could be kept.
        """
        self._take_arrived_states(wait=True)
        if self.states is None:
            raise RuntimeError("the table of hidden states is not there")
        return super().missing(request_ids, rows, lengths - 1, texts[:, 1:], texts[rows, 0])

    def draft(self, request_ids, rows, lengths, missing, texts, count: int):
        """As CachedPasses'."""
        return super().draft(request_ids, rows, lengths - 1, missing, texts[:, 1:], count)

    def _take_states(self, slots: torch.Tensor, carried: torch.Tensor | None) -> None:
        if carried is None:
            if self.states is None:  # on this rank alone, or none would be asked: the others need its part of the pass
                self.hidden_states[: len(slots)] = 0
                return
            carried = sent(self.states[slots], self.device)
            if self.eagle3_use_aux_hidden_state:
                carried = self.model.combine_hidden_states(carried)
        self.hidden_states[: len(carried)] = carried

    def _hidden(self, num_tokens: int) -> States:
        for_logits, carried = self.model(
            input_ids=self.input_ids[:num_tokens],
            positions=self._get_positions(num_tokens),
            hidden_states=self.hidden_states[:num_tokens],
        )
        return for_logits[:num_tokens], carried[:num_tokens]


class Eagle3Proposer(SwitchedDraftModel, EaglePasses):
    """With a head on the target's hidden states: vLLM's method `eagle3`."""

    def prepare_inputs(self, common_attn_metadata, *_unused):
        """All tokens of the step, rejected ones too: their slots are written again with the tokens in their place."""
        tokens = torch.arange(common_attn_metadata.num_actual_tokens, device=self.device)
        return common_attn_metadata, tokens

    def propose(self, target_hidden_states, common_attn_metadata, **rest) -> list[list[int]]:
        """Keep the step's hidden states, drafts or not, and draft as SamProposer does."""
        try:
            self.keep_states(common_attn_metadata.slot_mapping, target_hidden_states)
        except Exception:
            self._count_lost_states()
        return super().propose(**rest)

    def _count_lost_states(self) -> None:
        """Of the exception being handled."""
        if self.counters["draft_model_errors"] == 0:
            logger.exception("hidden states were not kept; drafts go on with others (logged once, then counted)")
        self.counters["draft_model_errors"] += 1
