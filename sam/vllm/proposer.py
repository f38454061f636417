"""vLLM's `custom_class` proposer: the model runner's batch in, draft tokens out.

Selected by `speculative_config={"model": "sam.vllm.proposer.SamProposer", "num_speculative_tokens": k}`;
its settings come from `additional_config["speculation"]` (sam.config.SpeculationConfig).
"""

import logging
import math
import os
import time
from dataclasses import replace

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting import origins, shape
from sam.drafting.drafter import Drafter
from sam.drafting.drafts import Drafts
from sam.drafting.paths import further
from sam.history.client import HistoryClient
from sam.record.engine_steps import accepted_tokens
from sam.sharing.client import INTERVAL_SECONDS, Client
from sam.sharing.drafter import SharingDrafter, make_drafter
from sam.sharing.link import Link
from sam.switch import goodput
from sam.switch.policies import make_policy
from sam.switch.policy import Policy, StepState
from sam.switch.queued_requests import QueuedRequests
from sam.vllm import patches, ranks, runner_hooks, warmup_cost
from sam.vllm.paths.planning import PathPlanner
from sam.vllm.paths.rows import PathRows, check_engine
from sam.vllm.tracked_requests import TrackedRequests

logger = logging.getLogger(__name__)

# Steps without drafts for which the drafter need not be called: one call then appends their tokens together.
MAX_STEPS_BEHIND = 32
REQUEST_COUNTERS, STEP_COUNTERS = ("tracked_requests", "untracked_requests"), ("draft_errors", "skipped_steps")
COUNTERS = (*REQUEST_COUNTERS, *STEP_COUNTERS, "policy_version", "filled_draft_tokens")


class SamProposer:
    """Tracks the requests of a model runner and drafts for them as the policy decides.

    An error in drafting never fails or changes a rollout: the step goes on without drafts, and the error is counted in
    `counters["draft_errors"]` and logged once.
    """

    def __init__(self, vllm_config):
        config = self._effective(SpeculationConfig.from_vllm(vllm_config) or SpeculationConfig())
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len = vllm_config.model_config.max_model_len
        graph_mode = warmup_cost.graph_mode(vllm_config)
        self.is_uniform = shape.is_uniform(config.draft_shape, graph_mode and graph_mode.name)
        self.num_paths = config.paths
        self.policy = self._make_policy(config, vllm_config)
        self.awaited = QueuedRequests(vllm_config.scheduler_config.max_num_seqs)
        self._sharing_seconds = INTERVAL_SECONDS
        self.drafter = self._make_drafter(config)
        # One dictionary with the drafter's own: everything in it goes to the metrics.
        self.counters = self.drafter.counters
        self.policy.counters = self.counters
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self.history = HistoryClient.of_engine(config, vllm_config.model_config, self.counters)
        # Whether the policy let requests speculate in the next step; the step recorder keeps it.
        self.switch_on = False
        self.wants_drafts = False  # whether the last plan had a budget
        self.drafted = 0  # draft tokens of the last call
        self._runner = None
        self._is_heard = True  # whether vLLM takes the drafts of this rank
        self._last: StepState | None = None  # the state that the policy last planned
        self._batch: list[str] = []  # request ids of that step
        self._began = 0.0  # start of the step under way, in seconds
        self._valid_for_steps = 0  # further steps in which the policy need not be asked
        self._steps_since_plan = 0
        self._steps_behind = 0  # steps since drafts were last asked of the drafter
        self._shares_at = math.inf  # seconds from which on new text is to be sent, drafts or not
        self.tracked: TrackedRequests | None = None
        self.paths: PathRows | None = None  # rows of further paths
        self._planner: PathPlanner | None = None

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What this drafter goes by of the engine's settings."""
        return config

    def _make_drafter(self, config: SpeculationConfig) -> Drafter:
        return make_drafter(config, self.num_speculative_tokens)

    def _make_policy(self, config: SpeculationConfig, vllm_config) -> Policy:
        name, table = warmup_cost.policy_and_table(config, vllm_config)
        sizes = warmup_cost.graph_sizes(vllm_config)
        goodput = {"step_cost": table, "graph_sizes": sizes, "uniform": self.is_uniform, "paths": config.paths}
        return make_policy(name, self.num_speculative_tokens, config.batch_size_threshold, **goodput)

    def bind(self, runner) -> None:
        """Give the proposer its model runner: vLLM calls `propose` without request ids."""
        self._runner = runner
        self.tracked = TrackedRequests(runner, self.drafter, self.history, self.counters)
        self._is_heard = ranks.is_drafting_rank(runner)
        if self.num_paths > 1:
            check_engine(runner.vllm_config)
            self.paths = runner.sam_paths = PathRows(runner, self.num_speculative_tokens, self.counters)
            whole = self.num_speculative_tokens if self.is_uniform else 0
            self._planner = PathPlanner(self.drafter, self.paths, self.num_paths, whole)
            self._open_paths(runner)
        if self.history and self._is_heard:
            self.history.start()

    def _open_paths(self, runner) -> None:
        """Call `PathRows.before_step` once the drafts of a step are known."""
        runner_hooks.add_path_rows(runner)

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas from now on, where speculation.sharing asks for it.

        Args:
            address: where the replica's server listens (sam.sharing.link).
        """
        if self._is_heard and isinstance(self.drafter, SharingDrafter):
            client = Client(Link(address).ask)
            self.drafter.share(client)
            client.start()
            self._shares_at = 0.0

    def weights_updated(self) -> None:
        """Count a weight sync: history evicts responses of older weights first."""
        self.counters["policy_version"] += 1
        if self.history and self._is_heard:
            self._keep_last_responses()

    def _keep_last_responses(self) -> None:
        """Of a rollout: no step comes after those that end last, so that the drafter has not been told."""
        try:
            self.tracked.release_finished()
        except Exception:
            self._count_error()
        self.history.weights_updated()

    def take_sources(self) -> np.ndarray:
        """int64 [SOURCES, 2], draft tokens by source since the last call: compared with the text, and accepted."""
        return origins.take(self.drafter.learned.by_source)

    def load_model(self, *_args, **_kwargs) -> None:
        """Compile the kernels; vLLM calls it once. There is no model to load.

        Raises:
            RuntimeError: nobody would `bind` the proposer, which would draft nothing.
        """
        if not patches.is_registered():
            raise RuntimeError(
                f"{type(self).__name__} drafts with the plugin `sam` only, which vLLM has not loaded: "
                f"VLLM_PLUGINS={os.environ.get('VLLM_PLUGINS')}: add it or unset it"
            )
        started = time.perf_counter()
        self.drafter.warm_up()
        goodput.warm_up()
        if self.num_paths > 1:
            further.warm_up(self.drafter)
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
            Per row up to `num_speculative_tokens` draft tokens; none on a rank whose drafts vLLM does not take.
        """
        if not self._is_heard:
            return [[] for _ in sampled_token_ids]
        try:
            if self._plan_holds(len(sampled_token_ids)):
                return self._skip(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
            return self._propose(list(map(len, sampled_token_ids)), num_tokens_no_spec, token_ids_cpu)
        except Exception:
            self._count_error()
            return [[] for _ in sampled_token_ids]

    def _count_error(self) -> None:
        """Of the exception being handled: the rollout goes on without drafts."""
        if self.counters["draft_errors"] == 0:
            logger.exception("drafting failed; the rollout goes on without drafts (logged once, then counted)")
        self.counters["draft_errors"] += 1

    def _plan_holds(self, rows: int) -> bool:
        return self._valid_for_steps > 0 and rows - self._path_rows() == self._last.running

    def _path_rows(self) -> int:
        """Rows of the batch that are further paths, and no requests."""
        return len(self.paths.rows) if self.paths else 0

    def _batch_ids(self) -> list[str]:
        """The requests of the batch."""
        ids = self._runner.input_batch.req_ids
        # Rows of paths that come and go change the order of the others.
        return sorted(set(ids) - self.paths.rows.keys()) if self.paths else ids.copy()

    def _skip(self, emitted: list, num_tokens_no_spec, token_ids_cpu) -> list[list[int]]:
        """A step without drafts for which the last plan still holds: it costs a microsecond."""
        self._began = time.perf_counter()
        self._valid_for_steps -= 1
        self._steps_since_plan += 1
        self._steps_behind += 1
        self.counters["skipped_steps"] += 1
        self._share_text(emitted, num_tokens_no_spec, token_ids_cpu)
        return [[] for _ in emitted]

    def _share_text(self, emitted: list, num_tokens_no_spec, token_ids_cpu) -> None:
        """In a step without drafts: append what the drafter lacks, from where it is shared, if it is time to.

        Args:
            emitted: for each row its tokens or their number.
        """
        if self._began < self._shares_at:
            return
        self._shares_at = self._began + self._sharing_seconds
        known = self._known_lengths(num_tokens_no_spec)
        rows, ids, appended = self.tracked.batch(emitted, known, token_ids_cpu)
        if rows:
            self.drafter.append(ids, *appended)

    def _propose(self, emitted: list[int], num_tokens_no_spec, token_ids_cpu) -> list[list[int]]:
        now = time.perf_counter()
        state = self._state(emitted, num_tokens_no_spec)
        self._observe(now, state, emitted)
        plan = self.policy.plan(state)
        self.switch_on = self.wants_drafts = plan.budget > 0
        self._last, self._began, self.drafted, self._valid_for_steps, self._steps_since_plan = state, now, 0, 0, 0
        self._batch = self._batch_ids()
        drafts: list[list[int]] = [[] for _ in emitted]
        if plan.budget == 0:
            self.counters["skipped_steps"] += 1
            self._steps_behind += 1
            if self._steps_behind < MAX_STEPS_BEHIND:
                self._valid_for_steps = min(plan.valid_for_steps, MAX_STEPS_BEHIND - 1 - self._steps_behind)
                self._share_text(emitted, num_tokens_no_spec, token_ids_cpu)
                return drafts
        known = self._known_lengths(num_tokens_no_spec)
        if known is None:
            return drafts
        self._steps_behind = 0
        if self.history:
            self.history.deliver(self.drafter)
        rows, ids, appended = self.tracked.batch(emitted, known, token_ids_cpu)
        if not rows:
            return drafts
        if self._planner:
            self._planner.learn(ids, *appended)
        remaining = self.max_model_len - 1 - known[rows]
        budgets = np.clip(remaining, 0, plan.budget or self.num_speculative_tokens).astype(np.int32)
        proposed = self.drafter.step(ids, *appended, budgets, plan.min_acceptance)
        proposed = self._combine(state, plan, rows, ids, known, token_ids_cpu, proposed)
        if plan.budget == 0:
            return drafts  # nobody verifies these, but the calibration learns from them: text may have begun to repeat
        lengths = self.policy.choose(state, proposed.acceptance, proposed.offsets)
        self.drafted = int(lengths.sum())
        self.switch_on = self.drafted > 0 or not len(proposed.acceptance)
        flat, begins = proposed.token_ids.tolist(), proposed.offsets.tolist()
        chosen = [flat[begin : begin + length] for begin, length in zip(begins, lengths.tolist(), strict=False)]
        if self._planner and self.drafted:
            chosen = self._planner.plan(self.policy, state, ids, chosen, budgets)
            self.drafted = sum(map(len, chosen))
        for row, draft in zip(rows, chosen, strict=True):
            drafts[row] = draft
        if self.is_uniform:
            others = self.paths.rows if self.paths else ()
            requests = [row for row, name in enumerate(self._runner.input_batch.req_ids) if name not in others]
            room, k = self.max_model_len - 1 - known, self.num_speculative_tokens
            self.counters["filled_draft_tokens"] += shape.fill_up(drafts, emitted, room, k, requests)
            self.drafted = sum(map(len, drafts))
        return drafts

    def _combine(self, state, plan, rows, ids, known, token_ids_cpu, proposed: Drafts) -> Drafts:
        """Another source's drafts beside those `proposed`."""
        return proposed

    def _known_lengths(self, num_tokens_no_spec) -> np.ndarray | None:
        """Tokens of each row that are on the host; None if they are too few to draft from."""
        return num_tokens_no_spec

    def _state(self, emitted: list[int], num_tokens_no_spec) -> StepState:
        rows, steps = len(emitted), self._steps_since_plan + 1
        running = rows - self._path_rows()
        return StepState(
            running=running,
            prefilling=emitted.count(0) - self._path_rows(),
            waiting=len(self._runner.requests) - rows,
            context=float(num_tokens_no_spec[:rows].sum()) / max(1, rows),
            # Of the step that has just ended.
            max_num_tokens_other_dp_ranks=getattr(self._runner, "sam_max_num_tokens_other_dp_ranks", 0),
            steps_since_plan=steps,
            awaited=self.awaited.expected(running, steps),
        )

    def _observe(self, now: float, state: StepState, emitted: list[int]) -> None:
        """Give the policy the time of the step that has just ended, if it is the one it planned: all requests in
        decode, none added or finished."""
        last = self._last
        if last is None or last.prefilling or state.prefilling or self._batch != self._batch_ids():
            return
        num_tokens = state.max_num_tokens_other_dp_ranks
        if last.max_num_tokens_other_dp_ranks != num_tokens:
            last = replace(last, max_num_tokens_other_dp_ranks=num_tokens)
        accepted = accepted_tokens(sum(emitted), verified=len(emitted) - self._path_rows())
        drafted = self.drafted + (self.paths.num_tokens if self.paths else 0)
        self.policy.observe(last, drafted, accepted, (now - self._began) * 1e3)
