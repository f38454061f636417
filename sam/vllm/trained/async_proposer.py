"""Draft models under asynchronous scheduling: the steps of sam.vllm.async_proposer, the passes of sam.vllm.trained.

vLLM 0.23 schedules its drafters with a model asynchronously by itself, so that no door is needed. Its own draft in
every step, on the device. Here a step without drafts waits for nothing, and one with drafts once, for its tokens, as
with sam alone. What passes draft stays on the device: the next step is prepared while they run, with room for the
drafts, and they are put into its input there. The host learns them when that step's tokens have come.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sam.drafting.shape import FILLER
from sam.verify.transfer import sent
from sam.vllm import patches
from sam.vllm.async_proposer import AsyncDrafting
from sam.vllm.trained.eagle import Eagle3Proposer
from sam.vllm.trained.made_drafts import MadeDrafts
from sam.vllm.trained.passes import begin_copy
from sam.vllm.trained.proposer import TrainedProposer


@dataclass
class ComingDrafts:
    """Drafts on the device, and on their way to the host.

    Attributes:
        made: what passes drafted.
        inputs: int32 [requests, passes] on the device; FILLER where a token is none: any id may be verified.
        copies: made's tokens and where they are finite, on the host; valid once `ended` is over.
        began, ended: events around the passes.
    """

    made: MadeDrafts
    inputs: torch.Tensor
    copies: tuple[torch.Tensor, torch.Tensor]
    began: Any
    ended: Any

    @classmethod
    def begin(cls, made: MadeDrafts, began, vocabulary: int) -> "ComingDrafts":
        """Begin the copies to the host."""
        is_token = made.finite & (made.tokens >= 0) & (made.tokens < vocabulary)
        inputs = made.tokens.where(is_token, FILLER).to(torch.int32)
        copies = begin_copy(made.tokens), begin_copy(made.finite)
        return cls(made, inputs, copies, began, _recorded())

    def arrive(self) -> tuple[np.ndarray, np.ndarray, float]:
        """Tokens, where they are finite, and the milliseconds of the passes, when the copies are over."""
        self.ended.synchronize()
        return *(copy.numpy() for copy in self.copies), self.began.elapsed_time(self.ended)

    def places(self, request_ids: list[str], ends, verifying: dict[str, list[int]]) -> tuple[list[int], list[int]]:
        """Where the drafts of a step go.

        Args:
            request_ids: of the step's batch.
            ends: for each of them, where its tokens end in the step's input; its draft is the last of them.
            verifying: drafts in the step, by request.

        Returns:
            Places in the input, and for each the place in `inputs`, its rows one after the other.
        """
        row_of, count = {name: row for row, name in enumerate(self.made.names)}, self.inputs.shape[1]
        to, of = [], []
        for name, end in zip(request_ids, ends, strict=True):
            if (row := row_of.get(name)) is not None and (draft := verifying.get(name)):
                begin, length = int(end) - len(draft), min(len(draft), count)
                to.extend(range(begin, begin + length))
                of.extend(range(row * count, row * count + length))
        return to, of


class AsyncPasses(AsyncDrafting):
    """The passes of a SwitchedDraftModel, a base after this one, at the ends of steps that were scheduled before."""

    reads_late = False  # passes begin when tokens are known, and run while vLLM schedules
    _began_passes: Any = None
    _coming: ComingDrafts | None = None  # drafts that the host does not know yet

    def bind(self, runner) -> None:
        """Draft after the step, with what has come to the host, and not within it; and fill in the next one's input:
        vLLM puts drafts of the device there only if it takes the sampled tokens from there too."""
        super().bind(runner)

        def prepare_and_fill_in(prepare, scheduler_output, num_reqs, total, ends):
            prepare(scheduler_output, num_reqs, total, ends)
            self.fill_in(num_reqs, ends)

        patches.put(runner, "propose_draft_token_ids", "draft_on_host", self.keep_on_device)
        patches.wrap(runner, "_prepare_input_ids", "draft_on_host", prepare_and_fill_in)

    def keep_on_device(self, _scheduler_output, sampled_token_ids: torch.Tensor, *_unused) -> list:
        """Called by vLLM before the tokens are copied: they are the next step's input if nobody waits for them.

        Args:
            sampled_token_ids: int32 [rows, 1 + longest draft], on the device.
        """
        self._runner.input_batch.prev_sampled_token_ids = sampled_token_ids[:, :1]
        return []

    def run_passes(self, *given):
        """As FirstRankDecides'."""
        self._began_passes = _recorded()
        return super().run_passes(*given)

    def _read_drafts(self, made: MadeDrafts, began: float) -> list[list[int]]:
        """Fillers, which the device replaces."""
        self._coming = ComingDrafts.begin(made, self._began_passes, self._vocabulary())
        return [[FILLER] * made.plan.count for _ in made.names]

    def before_step(self, scheduler_output) -> None:
        """As AsyncDrafting's."""
        batch = self._runner.input_batch
        if self._coming and (not batch.no_penalties or batch.bad_words_token_ids or batch.thinking_budget_state_holder):
            self._read_now()
        super().before_step(scheduler_output)

    def _read_now(self) -> None:
        """Penalties, bad words and budgets of thinking count a step's drafts on the host: one wait more."""
        self.counters["waited_steps"] += 1
        try:
            drafts = self._coming.inputs.tolist()
        except Exception:
            self._coming = self._drawn = None  # fillers are verified, and counted
            self.count_model_error()
            return
        for name, draft in zip(self._coming.made.names, drafts, strict=True):
            if (fillers := self._drafts.get(name)) is not None:
                fillers[: len(draft)] = draft[: len(fillers)]

    def fill_in(self, num_reqs: int, ends: np.ndarray) -> None:
        """Put the drafts into the step's input, where vLLM has put fillers.

        Args:
            num_reqs: rows of the batch.
            ends: int [rows], where each row's tokens end in the input.
        """
        if self._coming is None or not self.verifying:
            return
        runner = self._runner
        try:
            to, of = self._coming.places(runner.input_batch.req_ids[:num_reqs], ends[:num_reqs], self.verifying)
            if to:
                to, of = sent(torch.tensor([to, of]), runner.device)
                runner.input_ids.gpu[to] = self._coming.inputs.flatten()[of]
        except Exception:
            self._drawn = None  # fillers are verified, which nobody drew
            self.count_model_error()

    def _observe(self, now, state, emitted) -> None:
        """The step's tokens are there, and so are the drafts that it verified."""
        self._learn_coming()
        super()._observe(now, state, emitted)
        self._drafting_ms = 0.0  # also where the step's time was left out, since it waited and the one before did not

    def _learn_coming(self) -> None:
        coming, self._coming = self._coming, None
        if coming is None:
            return
        try:
            *drafted, self._drafting_ms = coming.arrive()
            self._take_drafts(coming.made, *drafted, self._drafting_ms)
        except Exception:
            self._errors_in_a_row += 1
            self.count_model_error()


def _recorded():
    event = torch.Event(enable_timing=True)
    event.record()
    return event


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
