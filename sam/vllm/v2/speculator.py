"""The second runner's speculator: drafts of the host's drafter, as tokens on the device."""

import logging
import time

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from sam.config import SpeculationConfig
from sam.history.client import HistoryClient
from sam.sharing.drafter import make_drafter, read_corpus_into, share_by_link
from sam.vllm.v2 import followed_requests
from sam.vllm.v2.followed_requests import FollowedRequests, Step

logger = logging.getLogger(__name__)

STEPS_UNDER_WAY = 3  # whose copies may not have ended; vLLM schedules two at once
COUNTERS = (*followed_requests.COUNTERS, "draft_errors", "skipped_steps", "waited_steps", "filled_draft_tokens")


class SamSpeculator(BaseSpeculator):
    """Drafts for the requests of a step once its tokens have come to the host, by the copy that is on its way anyway.

    Of several tensor-parallel ranks the first drafts, and sends the others what it has drafted.

    An error in drafting never fails or changes a rollout: it is counted in `counters["draft_errors"]` and logged once.

    Attributes:
        counters: those of COUNTERS, and the drafter's own.
        drafter: follows the engine's requests.
    """

    supports_mm_inputs = False
    draft_logits = None  # a draft token is certain: vLLM's own rejection sampler takes it with its target probability

    def __init__(self, vllm_config, device: torch.device):
        self._device, self._ranks = device, get_tp_group()
        self._max_model_len = vllm_config.model_config.max_model_len
        self._k = vllm_config.speculative_config.num_speculative_tokens
        config = SpeculationConfig.from_vllm(vllm_config)
        self.drafter = make_drafter(config, self._k)
        self.counters = self.drafter.counters
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        history = None
        if self._ranks.is_first_rank:
            read_corpus_into(self.drafter, config, vllm_config.model_config)
            history = HistoryClient.of_engine(config, vllm_config.model_config, self.counters)
        self._requests = FollowedRequests(self.drafter, self.counters, history)
        self._output: AsyncOutput | None = None
        # What is returned where nothing is drafted and nothing verified: the runner may write -1 into it.
        self._nothing = torch.zeros(
            (vllm_config.scheduler_config.max_num_seqs, self._k), dtype=torch.int64, device=device
        )
        started = time.perf_counter()
        self.drafter.warm_up()
        logger.info("drafter compiled in %.1f s", time.perf_counter() - started)
        if history:
            history.start()

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas, as sam.vllm.proposer.SamProposer.share."""
        if self._ranks.is_first_rank and share_by_link(self.drafter, address):
            self._requests.shares_at = 0.0

    def weights_updated(self) -> None:
        """Count a weight sync: history evicts responses of older weights first."""
        self.counters["policy_version"] += 1
        if self._requests.history:
            try:
                self._requests.read(time.perf_counter())
            except Exception:
                self._count_error()
            self._requests.history.weights_updated()

    def init_cudagraph_manager(self, cudagraph_mode) -> None:
        """There is no graph to make."""

    def capture(self) -> None:
        """There is no graph to capture."""

    def schedule(self, scheduler_output) -> None:
        """Called before the runner adds a step's new requests; where nothing is computed, the last ones have ended."""
        if not self._ranks.is_first_rank:
            return
        try:
            self._requests.schedule(scheduler_output)
            if not scheduler_output.num_scheduled_tokens:
                self._requests.read(time.perf_counter())
        except Exception:
            self._count_error()

    def keep(self, output: AsyncOutput) -> None:
        """Called with the copies of a step's tokens, which the runner starts before it calls `propose`."""
        self._output = output

    def propose(
        self, input_batch, *_, dummy_run=False, is_profile=False, num_speculative_tokens: int | None = None, **__
    ) -> torch.Tensor:
        """Draft for every row of the batch.

        Args:
            input_batch: vLLM's, of which request ids are read; of vLLM's other arguments none is needed.
            dummy_run, is_profile: touch nothing.
            num_speculative_tokens: tokens of each draft that the next step verifies; 0 switches drafting off, and the
                host waits for nothing.

        Returns:
            int64 [requests, k] on the device. Rows without a draft of that length are filled up by token ids that the
            text has: the runner computes as many tokens for every row.
        """
        rows = input_batch.num_reqs
        if dummy_run or is_profile:
            return self._nothing[:rows]
        budget = self._k if num_speculative_tokens is None else num_speculative_tokens
        if self._ranks.is_first_rank:
            drafts = self._propose(input_batch, budget)
        else:
            drafts = torch.empty_like(self._nothing[:rows]) if budget else self._nothing[:rows]
        return self._ranks.broadcast(drafts) if budget else drafts

    def _propose(self, input_batch, budget: int) -> torch.Tensor:
        """The drafts, on the first rank."""
        nothing = self._nothing[: input_batch.num_reqs]
        try:
            output, self._output, now = self._output, None, time.perf_counter()
            tokens, counts = output.sampled_token_ids, output.num_sampled_tokens_np
            step = Step(input_batch.req_ids, tokens, counts, output.copy_event)
            self._requests.end_step(step)
            if budget == 0:
                self.counters["skipped_steps"] += 1
                if self._requests.is_due(now):
                    self._requests.read(now, STEPS_UNDER_WAY)
                return nothing
            self.counters["waited_steps"] += 1
            self._requests.read(now)
            return async_tensor_h2d(self._draft(step, budget), device=self._device)
        except Exception:
            self._count_error()
            return torch.zeros_like(nothing)  # token ids, for what the next step computes all the same

    def _draft(self, step: Step, budget: int) -> np.ndarray:
        """int64 [rows, k]."""
        lasts = np.maximum(step.counts - 1, 0)
        drafts = np.repeat(step.tokens[np.arange(len(lasts)), lasts, None].astype(np.int64), self._k, axis=1)
        drafts[step.counts == 0] = 0  # what stands in these rows need not be a token
        if rows := self._requests.rows_of(step):
            ids = [step.request_ids[row] for row in rows]
            room = self._max_model_len - 1 - self._requests.lengths(ids)
            found = self.drafter.draft(ids, np.clip(room, 0, budget).astype(np.int32))
            lengths = np.diff(found.offsets)
            starts = np.repeat(found.offsets[:-1], lengths)
            places = np.arange(len(found.token_ids)) - starts
            drafts[np.repeat(rows, lengths), places] = found.token_ids
            self.counters["filled_draft_tokens"] += int(budget * len(rows) - lengths.sum())
        return drafts

    def _count_error(self) -> None:
        """Of the exception being handled."""
        if self.counters["draft_errors"] == 0:
            logger.exception("drafting failed; the rollout goes on without drafts (logged once, then counted)")
        self.counters["draft_errors"] += 1
