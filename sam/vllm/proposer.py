"""vLLM's `custom_class` proposer: the model runner's batch in, draft tokens out.

Selected by `speculative_config={"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": k}`;
its settings come from `additional_config["speculation"]` (recipe.speculation, configs/speculation/knobs.yaml).
"""

from __future__ import annotations

import logging
import time
from pathlib import Path

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
    "corpus": None,
    "corpus_bias": 5,
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
            corpus=Path(settings["corpus"]) if settings["corpus"] else None,
            corpus_bias=settings["corpus_bias"],
        )
        # One dictionary with the drafter's own: everything in it goes to the metrics.
        self.counters = self.drafter.counters
        self.counters.update(faults=0, followed=0, refused=0, off_steps=0, policy_version=0)
        # Whether the next step's drafts were asked for: the switch as the step recorder shows it.
        self.switch_on = False
        self._runner = None
        self._followed: set[str] = set()
        self._refused: set[str] = set()

    def bind(self, runner) -> None:
        """Give the proposer its model runner: vLLM calls `propose` without request ids."""
        self._runner = runner

    def weights_updated(self) -> None:
        """Say that responses are written by a new policy from now on: history forgets those of old ones first."""
        self.counters["policy_version"] += 1

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
        sampled = [row for row, tokens in enumerate(sampled_token_ids) if tokens]
        followed = self._followed
        rows = [r for r in sampled if request_ids[r] in followed or self._follow(r, request_ids[r], token_ids_cpu)]
        if not rows:
            return [[] for _ in sampled_token_ids]
        ids = [request_ids[row] for row in rows]
        token_ids, offsets = self._new_tokens(rows, ids, num_tokens_no_spec, token_ids_cpu)
        state = StepState(running=len(request_ids), prefilling=len(request_ids) - len(sampled))
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

    def _follow(self, row: int, request_id: str, token_ids_cpu) -> bool:
        """Begin to follow the request of a row; False if its prompt cannot be followed."""
        if request_id in self._refused:
            return False
        prompt = token_ids_cpu[row, : int(self._runner.input_batch.num_prompt_tokens[row])]
        try:
            self.drafter.start(request_id, prompt, self.counters["policy_version"])
        except ValueError as error:
            if self.counters["refused"] == 0:
                logger.warning("no drafts for a request: %s (said once, then counted)", error)
            self.counters["refused"] += 1
            self._refused.add(request_id)
            return False
        self._followed.add(request_id)
        self.counters["followed"] += 1
        return True

    def _new_tokens(self, rows, ids, num_tokens_no_spec, token_ids_cpu) -> tuple[np.ndarray, np.ndarray]:
        """Tokens the drafter has not seen: this step's, or more after a preemption or a step it missed."""
        known, ends = self.drafter.lengths(ids), num_tokens_no_spec[rows]
        offsets = np.zeros(len(rows) + 1, dtype=np.int64)
        np.cumsum(np.maximum(ends - known, 0), out=offsets[1:])
        spans = zip(rows, known.tolist(), ends.tolist(), strict=True)
        pieces = [token_ids_cpu[row, start:end] for row, start, end in spans]
        return np.concatenate(pieces).astype(np.int32, copy=False), offsets

    def _release_finished(self) -> None:
        """Preempted requests leave the batch but stay in `runner.requests`; finished and aborted leave both."""
        if gone := [request_id for request_id in self._followed if request_id not in self._runner.requests]:
            for request_id in gone:
                self.drafter.finish(request_id)
            self._followed.difference_update(gone)
        self._refused.intersection_update(self._runner.requests)
