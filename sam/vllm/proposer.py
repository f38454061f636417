"""The synchronous loop of vLLM's first model runner, as its drafter `custom_class`.

    _update_states   puts rows of further paths into what was scheduled; then vLLM updates its batch, and the session is
                     told which requests are gone and which are new; vLLM computes and verifies
    propose          the session is told the step's tokens; plans and drafts

vLLM's scheduler asks for the drafts after each step, and schedules the next one with them.
"""

import numpy as np

from sam.vllm.adapter import Adapter


class SamProposer(Adapter):
    """Drafts for the requests of a step when vLLM has its tokens. An error in drafting never fails or changes a
    rollout: the step goes on without drafts, and the error is counted and logged once."""

    is_async = False

    def before_step(self, scheduled) -> None:
        self._verify(dict(scheduled.scheduled_spec_decode_tokens), scheduled)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings=None,
    ) -> list[list[int]]:
        """Per row up to `num_speculative_tokens` draft tokens; none on a rank whose drafts vLLM does not take.

        Args:
            sampled_token_ids: per row the tokens this step produced; empty for a row still in its prompt.
            num_tokens_no_spec, token_ids_cpu: the batch's.
        """
        counts = np.array(list(map(len, sampled_token_ids)))
        drafts = self._draft_known(counts) if self.is_drafting_rank else {}
        self.last.drafted = sum(map(len, drafts.values()))
        return [drafts.get(name, []) for name in self._runner.input_batch.req_ids]
