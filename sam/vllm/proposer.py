"""vLLM's `custom_class` proposer: the model runner's batch in, draft tokens out.

Selected by `speculative_config={"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": k}`;
its settings come from `additional_config["speculation"]` (recipe.speculation, configs/speculation/knobs.yaml).
"""

from __future__ import annotations

import logging
import time

import numpy as np

from sam.drafter import Drafter
from sam.switch import StepState, make_policy

logger = logging.getLogger(__name__)

DEFAULTS = {
    "policy": "threshold",
    "batch_size_threshold": 8,
    "fixed_cost_rows": 0,
    "scope": "group",
    "history_tokens": 0,
    "memory_budget_mib": 2048,
}


class SamProposer:
    """Follows the requests of a model runner and drafts for those that the switch lets speculate.

    A fault in drafting never fails or changes a rollout: the step goes on without drafts, the fault is
    counted in `counters["faults"]` and logged once.
    """

    def __init__(self, vllm_config):
        settings = {**DEFAULTS, **(vllm_config.additional_config or {}).get("speculation", {})}
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        self.policy = make_policy(
            settings["policy"],
            self.num_speculative_tokens,
            settings["batch_size_threshold"],
            settings["fixed_cost_rows"],
        )
        self.drafter = Drafter(
            max_draft_tokens=self.num_speculative_tokens,
            scope=settings["scope"],
            history_tokens=settings["history_tokens"] if settings["scope"] == "history" else 0,
            memory_budget_bytes=settings["memory_budget_mib"] << 20,
        )
        # One dictionary with the drafter's own: everything in it goes to the metrics.
        self.counters = self.drafter.counters
        self.counters.update(faults=0, followed=0, off_steps=0)
        # Whether the next step's drafts were asked for: the switch as the step recorder shows it.
        self.switch_on = False
        self._runner = None
        self._followed: set[str] = set()

    def bind(self, runner) -> None:
        """Give the proposer its model runner: vLLM calls `propose` without request ids."""
        self._runner = runner

    def load_model(self, *_args, **_kwargs) -> None:
        started = time.perf_counter()
        self.drafter.warm_up()
        logger.info("drafter compiled in %.1f s", time.perf_counter() - started)

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: np.ndarray,
        token_ids_cpu: np.ndarray,
        slot_mappings=None,
    ) -> list[list[int]]:
        """Draft for every row of the batch.

        Args:
            sampled_token_ids: per row the tokens this step produced; empty for a row still in its prompt.
            num_tokens_no_spec: int [rows], tokens of each row without drafts, this step's included.
            token_ids_cpu: int32 [rows, max_model_len], the rows' tokens.
            slot_mappings: unused; drafting needs no KV cache.

        Returns:
            Per row up to `num_speculative_tokens` draft tokens.
        """
        try:
            return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            if self.counters["faults"] == 0:
                logger.exception("drafting failed; the rollout goes on without drafts (logged once, then counted)")
            self.counters["faults"] += 1
            return [[] for _ in sampled_token_ids]

    def _propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu) -> list[list[int]]:
        batch = self._runner.input_batch
        request_ids = batch.req_ids
        self._release_finished()
        self.switch_on = False
        rows = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        if not rows:
            return [[] for _ in sampled_token_ids]
        ids = [request_ids[row] for row in rows]
        token_ids, offsets = self._new_tokens(rows, ids, num_tokens_no_spec, token_ids_cpu)
        state = StepState(running=len(request_ids), prefilling=len(request_ids) - len(rows))
        budget = self.policy.draft_budget(state)
        self.switch_on = budget > 0
        drafts: list[list[int]] = [[] for _ in sampled_token_ids]
        if budget == 0:
            self.counters["off_steps"] += 1
            self.drafter.append(ids, token_ids, offsets)
            return drafts
        room = self.max_model_len - 1 - num_tokens_no_spec[rows]
        budgets = np.clip(room, 0, budget).astype(np.int32)
        proposed = self.drafter.step(ids, token_ids, offsets, budgets, self.policy.min_survival(state))
        flat, bounds = proposed.token_ids.tolist(), proposed.offsets.tolist()
        for i, row in enumerate(rows):
            drafts[row] = flat[bounds[i] : bounds[i + 1]]
        return drafts

    def _new_tokens(self, rows, ids, num_tokens_no_spec, token_ids_cpu) -> tuple[np.ndarray, np.ndarray]:
        """Tokens the drafter has not seen: this step's, or more after a preemption or a step it missed."""
        pieces, offsets = [], np.zeros(len(rows) + 1, dtype=np.int64)
        for i, (row, request_id) in enumerate(zip(rows, ids, strict=True)):
            if request_id not in self._followed:
                prompt_length = int(self._runner.input_batch.num_prompt_tokens[row])
                self.drafter.start(request_id, token_ids_cpu[row, :prompt_length])
                self._followed.add(request_id)
                self.counters["followed"] += 1
            piece = token_ids_cpu[row, self.drafter.num_tokens(request_id) : num_tokens_no_spec[row]]
            pieces.append(piece)
            offsets[i + 1] = offsets[i] + len(piece)
        return np.concatenate(pieces).astype(np.int32, copy=False), offsets

    def _release_finished(self) -> None:
        """Preempted requests leave the batch but stay in `runner.requests`; finished and aborted leave both."""
        if gone := [request_id for request_id in self._followed if request_id not in self._runner.requests]:
            for request_id in gone:
                self.drafter.finish(request_id)
            self._followed.difference_update(gone)
