"""Draft models under asynchronous scheduling: the steps of sam.vllm.async_proposer, the passes of sam.vllm.trained.

vLLM 0.23 schedules its drafters with a model asynchronously by itself, so that no door is needed. Its own draft in
every step, on the device. Here a step without drafts waits for nothing; one with drafts waits once for its tokens, as
with sam alone, and, where passes were made, for what they gave, while the device has nothing else to do.
"""

import torch

from sam.vllm.async_proposer import AsyncDrafting
from sam.vllm.trained.eagle import Eagle3Proposer
from sam.vllm.trained.proposer import TrainedProposer


class AsyncPasses(AsyncDrafting):
    """The passes of a SwitchedDraftModel, a base after this one, at the ends of steps that were scheduled before."""

    def bind(self, runner) -> None:
        """Draft after the step, with what has come to the host, and not within it.

        Root cause: GPUModelRunner.propose_draft_token_ids (vLLM 0.23) gathers what a draft model reads that drafts in
        every step, and copies counts of accepted tokens. Can go when it asks its drafters.
        """
        super().bind(runner)
        runner.propose_draft_token_ids = self.keep_on_device

    def keep_on_device(self, _scheduler_output, sampled_token_ids: torch.Tensor, *_unused) -> list:
        """Called by vLLM before the tokens are copied: they are the next step's input if nobody waits for them.

        Args:
            sampled_token_ids: int32 [rows, 1 + longest draft], on the device.
        """
        self._runner.input_batch.prev_sampled_token_ids = sampled_token_ids[:, :1]
        return []

    def _observe(self, now, state, emitted) -> None:
        super()._observe(now, state, emitted)
        self._drafting_ms = 0.0  # also where the step's time was left out, since it waited and the one before did not


class AsyncTrainedProposer(AsyncPasses, TrainedProposer):
    """With a language model of its own."""


class AsyncEagle3Proposer(AsyncPasses, Eagle3Proposer):
    """With a head on the target's hidden states, whose copies to the host no step waits for."""

    def keep_on_device(
        self,
        scheduler_output,
        sampled_token_ids,
        _sampling,
        hidden_states,
        _sampled,
        aux_hidden_states,
        _spec,
        batch,
        *_,
    ):
        """As AsyncPasses'; the step's hidden states begin their way to the host.

        Args:
            hidden_states: [tokens or more, hidden size], of the last layer.
            aux_hidden_states: the same of each layer that the head reads; None if it reads the last one's.
            batch: vLLM's CommonAttentionMetadata.
        """
        try:
            read, tokens = aux_hidden_states or [hidden_states], batch.num_actual_tokens
            self.keep_states_later(batch.slot_mapping, torch.cat([states[:tokens] for states in read], dim=-1))
        except Exception:
            self._count_lost_states()
        return super().keep_on_device(scheduler_output, sampled_token_ids)
