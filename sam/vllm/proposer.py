"""vLLM's `custom_class` proposer: the model runner's batch in, draft tokens out."""

import logging
import os
import time
from dataclasses import dataclass, field, replace

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.drafting.texts import Drafts
from sam.history.client import HistoryClient
from sam.record.engine_steps import accepted_tokens
from sam.sharing.drafter import make_drafter, read_corpus_into, share_by_link
from sam.switch.policies import make_policy, warm_up
from sam.switch.policy import Plan, StepState
from sam.vllm import hooks, patches, ranks, warmup_cost
from sam.vllm.paths.rows import PathRows, check_engine
from sam.vllm.tracked_requests import TrackedBatch, TrackedRequests

logger = logging.getLogger(__name__)

COUNTERS = ("tracked_requests", "untracked_requests", "draft_errors", "skipped_steps", "policy_version")


@dataclass
class StepResult:
    """What a step leaves behind, for the next one, the step recorder and the scheduler."""

    state: StepState | None = None  # that the policy planned for; None if none is to be compared with the next one
    request_ids: list[str] = field(default_factory=list)  # of that step's batch
    plan: Plan = Plan(0)  # of the drafts that the next step verifies
    began: float = 0.0  # when the next step began, in seconds
    drafted: int = 0  # draft tokens of the next step
    is_on: bool = False  # whether the policy lets requests speculate in the next step
    valid_for_steps: int = 0  # further steps with as many running requests for which the policy need not be asked
    steps: int = 0  # in which it was not asked

    def holds(self, running: int) -> bool:
        """Whether the plan, of no drafts, is also that of a step with `running` requests."""
        return self.valid_for_steps > 0 and self.state.running == running


class SamProposer:
    """Tracks the requests of a model runner and drafts for them as the policy decides. An error in drafting never fails
    or changes a rollout: the step goes on without drafts, and the error is counted and logged once."""

    paths: PathRows | None = None  # rows of further paths, with speculation.paths

    def __init__(self, vllm_config):
        self.config = config = self._effective(SpeculationConfig.from_vllm(vllm_config))
        self.num_speculative_tokens = k = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        if (mode := warmup_cost.graph_mode(vllm_config)) and mode.name == "FULL_DECODE_ONLY":
            raise ValueError("cudagraph_mode=FULL_DECODE_ONLY: no graph has drafts of several lengths: set FULL")
        table, graph_sizes = warmup_cost.table_of(config), warmup_cost.graph_sizes(vllm_config)
        goodput_only = {"step_cost": table, "graph_sizes": graph_sizes, "paths": config.paths}
        self.policy = make_policy(config.policy, k, config.batch_size_threshold, **goodput_only)
        self.drafter = self._make_drafter(config)
        # One dictionary with the drafter's own: everything in it goes to the metrics.
        self.counters = self.policy.counters = self.drafter.counters
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.last = StepResult()
        self.is_drafting_rank = True  # whether vLLM takes the drafts of this rank

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What this drafter goes by of the engine's settings."""
        return config

    def _make_drafter(self, config: SpeculationConfig) -> Drafter:
        return make_drafter(config, self.num_speculative_tokens)

    @property
    def wants_drafts(self) -> bool:
        """Whether the last plan asked for drafts."""
        return self.last.plan.budget > 0

    def bind(self, runner) -> None:
        """Give the proposer its model runner: vLLM calls `propose` without request ids."""
        history = HistoryClient.of_engine(self.config, runner.vllm_config.model_config, self.counters)
        self._runner, self.tracked = runner, TrackedRequests(runner, self.drafter, history, self.counters)
        self.is_drafting_rank = ranks.is_drafting_rank(runner)
        if self.is_drafting_rank:
            read_corpus_into(self.drafter, self.config, runner.vllm_config.model_config)
        if self.config.paths > 1:
            check_engine(runner.vllm_config)
            of_rows = self.config.paths, self.num_speculative_tokens, self.counters
            self.paths = runner.sam_paths = PathRows(runner, self.drafter, *of_rows)
            if not runner.use_async_scheduling:  # else `before_step` calls it, once the drafts of a step are known
                hooks.give_own_counts(runner)
                patches.before(runner, "_update_states", "add_path_rows", self.paths.before_step)
        if history and self.is_drafting_rank:
            history.start()

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas from now on, where speculation.sharing asks for it, by the
        address at which the replica's server listens (sam.sharing.link)."""
        if self.is_drafting_rank and share_by_link(self.drafter, address):
            self.tracked.shares_at = 0.0

    def weights_updated(self) -> None:
        """Count a weight sync: the history keeps responses by their weights."""
        self.counters["policy_version"] += 1
        if self.tracked.history and self.is_drafting_rank:
            try:
                self.tracked.release_finished()  # no step comes after the responses that end last
            except Exception:
                self._count_error()
            self.tracked.history.weights_updated()

    def load_model(self, *_args, **_kwargs) -> None:
        """Compile the kernels; vLLM calls it once. RuntimeError if nobody would `bind` the proposer."""
        if not patches.is_registered():
            raise RuntimeError(
                f"{type(self).__name__} drafts with the plugin `sam` only, which vLLM has not loaded (VLLM_PLUGINS="
                f"{os.environ.get('VLLM_PLUGINS')}: add it or unset it), or which does not know this vLLM"
            )
        self.drafter.warm_up()
        warm_up()

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
        try:
            drafts = self._step(emitted, lengths, texts) if self.is_drafting_rank else None
        except Exception:
            self._count_error()
            drafts = None
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
        last, others, rows = self.last, self._num_path_rows(), len(emitted)
        if last.holds(rows - others):
            last.began, last.steps, last.valid_for_steps = now, last.steps + 1, last.valid_for_steps - 1
            self.counters["skipped_steps"] += 1
            return last.plan
        state = StepState(
            running=rows - others,
            prefilling=emitted.count(0) - others,
            context=float(lengths[:rows].sum()) / max(1, rows),
            # Of the step that has just ended.
            max_num_tokens_other_dp_ranks=getattr(self._runner, "sam_max_num_tokens_other_dp_ranks", 0),
            steps_since_plan=last.steps + 1,
        )
        self._observe(now, state, emitted)
        plan = self.policy.plan(state)
        valid_for_steps = 0 if plan.budget else plan.valid_for_steps
        self.counters["skipped_steps"] += not plan.budget
        self.last = StepResult(state, self._batch_ids(), plan, now, 0, plan.budget > 0, valid_for_steps)
        return plan

    def _observe(self, now: float, state: StepState, emitted: list[int]) -> None:
        """Give the policy the time of the step that has just ended, if it is the one it planned: all requests in
        decode, none added or finished."""
        last = self.last.state
        if last is None or last.prefilling or state.prefilling or self.last.request_ids != self._batch_ids():
            return
        last = replace(last, max_num_tokens_other_dp_ranks=state.max_num_tokens_other_dp_ranks)
        accepted = accepted_tokens(sum(emitted), verified=len(emitted) - self._num_path_rows())
        of_rows = self._num_path_rows() + self.paths.num_draft_tokens if self.paths else 0
        self.policy.observe(last, self.last.drafted + of_rows, accepted, (now - self.last.began) * 1e3)

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
        tokens, offsets, state = drafts.token_ids, drafts.offsets, self.last.state
        if tokens.ndim != 1 or (tokens < 0).any():
            raise ValueError(f"drafts of shape {tokens.shape} from {tokens.min(initial=0)}: expected token ids")
        lengths = self.policy.choose(state, drafts.acceptance, offsets)
        self.last.is_on = bool(lengths.any()) or not len(drafts.acceptance)
        flat, ends = tokens.tolist(), (offsets[:-1] + lengths).tolist()
        cut = [flat[begin:end] for begin, end in zip(offsets[:-1].tolist(), ends, strict=True)]
        return self.paths.plan(self.policy, state, batch.ids, cut, budgets) if self.paths and any(cut) else cut

    def _count_error(self) -> None:
        """Of the exception being handled: the rollout goes on without drafts."""
        if self.counters["draft_errors"] == 0:
            logger.exception("drafting failed; the rollout goes on without drafts (logged once, then counted)")
        self.counters["draft_errors"] += 1
