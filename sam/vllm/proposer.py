"""vLLM's `custom_class` proposer: the model runner's batch in, draft tokens out."""

import os
import time

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.texts import Drafts
from sam.engine.session import Drafting, Session
from sam.record.engine_steps import accepted_tokens
from sam.sharing.drafter import make_drafter
from sam.switch.policy import Plan, StepState
from sam.vllm import hooks, patches, ranks, warmup_cost
from sam.vllm.paths.rows import PathRows, check_engine
from sam.vllm.tracked_requests import TrackedBatch, TrackedRequests


class SamProposer(Drafting):
    """Tracks the requests of a model runner and drafts for them as the policy decides. An error in drafting never fails
    or changes a rollout: the step goes on without drafts, and the error is counted and logged once."""

    paths: PathRows | None = None  # rows of further paths, with speculation.paths

    def __init__(self, vllm_config):
        self.config = config = self._effective(SpeculationConfig.from_vllm(vllm_config))
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        if (mode := warmup_cost.graph_mode(vllm_config)) and mode.name == "FULL_DECODE_ONLY":
            raise ValueError("cudagraph_mode=FULL_DECODE_ONLY: no graph has drafts of several lengths: set FULL")
        table, graph_sizes = warmup_cost.table_of(config), warmup_cost.graph_sizes(vllm_config)
        goodput_only = {"step_cost": table, "graph_sizes": graph_sizes, "paths": config.paths}
        self.session = Session(config, self._make_drafter(config), goodput_only)
        self.is_drafting_rank = True  # whether vLLM takes the drafts of this rank

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What this drafter goes by of the engine's settings."""
        return config

    def _make_drafter(self, config: SpeculationConfig) -> Drafter:
        return make_drafter(config, self.num_speculative_tokens)

    def bind(self, runner) -> None:
        """Give the proposer its model runner: vLLM calls `propose` without request ids."""
        self._runner = runner
        self.tracked = TrackedRequests(runner, self.session)
        self.is_drafting_rank = ranks.is_drafting_rank(runner)
        if self.is_drafting_rank:
            self.session.begin(runner.vllm_config.model_config)
        if self.config.paths > 1:
            check_engine(runner.vllm_config)
            of_rows = self.config.paths, self.num_speculative_tokens, self.counters
            self.paths = runner.sam_paths = PathRows(runner, self.drafter, *of_rows)
            if not runner.use_async_scheduling:  # else `before_step` calls it, once the drafts of a step are known
                hooks.give_own_counts(runner)
                patches.before(runner, "_update_states", "add_path_rows", self.paths.before_step)

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas, as Session.share."""
        if self.is_drafting_rank:
            self.session.share(address)

    def weights_updated(self) -> None:
        """Count a weight sync."""
        self.session.weights_updated(self.tracked.release_finished)

    def load_model(self, *_args, **_kwargs) -> None:
        """Compile the kernels; vLLM calls it once. RuntimeError if nobody would `bind` the proposer."""
        if not patches.is_registered():
            raise RuntimeError(
                f"{type(self).__name__} drafts with the plugin `sam` only, which vLLM has not loaded (VLLM_PLUGINS="
                f"{os.environ.get('VLLM_PLUGINS')}: add it or unset it), or which does not know this vLLM"
            )
        self.session.warm_up()

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
            num_tokens_no_spec: int [rows], tokens of each text without drafts (int32 [rows, max_model_len]).
        """
        return self._propose(list(map(len, sampled_token_ids)), num_tokens_no_spec, token_ids_cpu)

    def _propose(self, emitted: list[int], lengths: np.ndarray, texts: np.ndarray) -> list[list[int]]:
        """As `propose`, from the number of tokens that each row's step produced; never raises."""
        drafts = None
        if self.is_drafting_rank:
            with self.session.harmless():
                drafts = self._step(emitted, lengths, texts)
        return drafts or [[] for _ in emitted]

    def _step(self, emitted: list[int], lengths: np.ndarray, texts: np.ndarray) -> list[list[int]] | None:
        """Drafts for every row; None if nobody drafts in this step."""
        now = time.perf_counter()
        plan = self._plan(now, emitted, lengths)
        if not plan.budget and not self.tracked.is_due(now):
            return None
        if (known := self._known_lengths(lengths)) is None:
            return None
        batch = self.tracked.update(now, emitted, known, texts)
        if not batch or not plan.budget:
            return None
        budgets = np.clip(self.max_model_len - 1 - batch.lengths, 0, plan.budget).astype(np.int32)
        drafts = self._combine(plan, batch, self.drafter.draft(batch.ids, budgets, plan.min_acceptance))
        placed: list[list[int]] = [[] for _ in emitted]
        for row, draft in zip(batch.rows, self._cut(batch, budgets, drafts), strict=True):
            placed[row] = draft
        self.last.drafted = sum(map(len, placed))
        return placed

    def _plan(self, now: float, emitted: list[int], lengths: np.ndarray) -> Plan:
        """Ask the policy, which is first told of the step that has just ended; not while its last answer holds."""
        others = self._num_path_rows()
        rows = len(emitted)
        if self.session.switch.holds(now, rows - others):
            return self.last.plan
        state = StepState(
            running=rows - others,
            prefilling=emitted.count(0) - others,
            context=float(lengths[:rows].sum()) / max(1, rows),
            # Of the step that has just ended.
            max_num_tokens_other_dp_ranks=getattr(self._runner, "sam_max_num_tokens_other_dp_ranks", 0),
        )
        self._observe(now, state, emitted)
        return self.session.switch.plan(now, state, self._batch_ids())

    def _observe(self, now: float, state: StepState, emitted: list[int]) -> None:
        """Give the policy the time of the step that has just ended."""
        accepted = accepted_tokens(sum(emitted), verified=len(emitted) - self._num_path_rows())
        of_rows = self._num_path_rows() + self.paths.num_draft_tokens if self.paths else 0
        self.session.switch.observe(now, state, self._batch_ids(), self.last.drafted + of_rows, accepted)

    def _batch_ids(self) -> list[str]:
        ids = self._runner.input_batch.req_ids
        # Rows of paths that come and go change the order of the others.
        return sorted(set(ids) - self.paths.rows.keys()) if self.paths else ids.copy()

    def _num_path_rows(self) -> int:
        """Rows of the batch that are further paths, and no requests."""
        return len(self.paths.rows) if self.paths else 0

    def _known_lengths(self, lengths: np.ndarray) -> np.ndarray | None:
        """int [rows], tokens of each row that are on the host; None if they are too few to draft from."""
        return lengths

    def _combine(self, plan: Plan, batch: TrackedBatch, drafts: Drafts) -> Drafts:
        """Replace drafts by those of a trained drafter where that pays; here there is none."""
        return drafts

    def _cut(self, batch: TrackedBatch, budgets: np.ndarray, drafts: Drafts) -> list[list[int]]:
        """The part of each request's draft that the policy verifies."""
        cut = self.session.switch.cut(drafts)
        if not self.paths or not any(cut):
            return cut
        return self.paths.plan(self.policy, self.last.state, batch.ids, cut, budgets)
