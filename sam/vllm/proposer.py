"""The synchronous loop of vLLM's first model runner, as its drafter `custom_class`.

    _update_states   puts rows of further paths into what was scheduled; then vLLM updates its batch, and the session is
                     told which requests are gone and which are new; vLLM computes and verifies
    propose          the session is told the step's tokens; plans and drafts

vLLM's scheduler asks for the drafts after each step, and schedules the next one with them. `Adapter` is what it has in
common with the asynchronous loop: the session that they hold, and what they tell it.
"""

import os

import numpy as np

from sam.config import SpeculationConfig
from sam.drafting.drafter import Drafter
from sam.engine.requests import Step, Text
from sam.engine.session import Drafting, Session
from sam.sharing.drafter import make_drafter
from sam.vllm import hooks, patches, ranks, warmup_cost
from sam.vllm.paths.rows import PathRows, check_engine


class Adapter(Drafting):
    """Holds the session of a model runner, as vLLM's drafter.

    Attributes:
        session: drafts.
        verifying: drafts of the step under way, by request.
        is_drafting_rank: whether vLLM takes the drafts of this rank.
        paths: rows of further paths, with speculation.paths.
    """

    is_async: bool  # whether vLLM schedules a step before the tokens of the one before are known
    paths: PathRows | None = None

    def __init__(self, vllm_config):
        self.config = config = self._effective(SpeculationConfig.from_vllm(vllm_config))
        self.num_speculative_tokens = vllm_config.speculative_config.num_speculative_tokens
        if (mode := warmup_cost.graph_mode(vllm_config)) and mode.name == "FULL_DECODE_ONLY":
            raise ValueError("cudagraph_mode=FULL_DECODE_ONLY: no graph has drafts of several lengths: set FULL")
        table = warmup_cost.table_of(config)
        goodput_only = {"step_cost": table, "graph_sizes": warmup_cost.graph_sizes(vllm_config), "paths": config.paths}
        longest = vllm_config.model_config.max_model_len
        self.session = Session(config, self._make_drafter(config), goodput_only, longest, self.is_async)
        self.is_drafting_rank = True
        self.verifying: dict[str, list[int]] = {}

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What this drafter goes by of the engine's settings."""
        return config

    def _make_drafter(self, config: SpeculationConfig) -> Drafter:
        return make_drafter(config, self.num_speculative_tokens)

    def bind(self, runner) -> None:
        """Take part in the steps of a model runner."""
        self._runner = runner
        self.is_drafting_rank = ranks.is_drafting_rank(runner)
        if self.is_drafting_rank:
            self.session.begin(self.config, runner.vllm_config.model_config)
        if self.config.paths > 1:
            check_engine(runner.vllm_config)
            of_rows = self.config.paths, self.num_speculative_tokens, self.counters
            self.paths = self.session.paths = runner.sam_paths = PathRows(runner, self.drafter, *of_rows)
            if not self.is_async:  # there `before_step` is given the model runner's own copy
                hooks.give_own_counts(runner)
        patches.wrap(runner, "_update_states", "draft_on_host", self._update_states)

    def share(self, address: str) -> None:
        """Exchange text with the drafters of other replicas, as Session.share."""
        if self.is_drafting_rank:
            self.session.share(address)

    def weights_updated(self) -> None:
        """Count a weight sync."""
        self.session.weights_updated()

    def load_model(self, *_args, **_kwargs) -> None:
        """Compile the kernels; vLLM calls it once. RuntimeError if nobody would `bind` the drafter."""
        if not patches.is_registered():
            raise RuntimeError(
                f"{type(self).__name__} drafts with the plugin `sam` only, which vLLM has not loaded (VLLM_PLUGINS="
                f"{os.environ.get('VLLM_PLUGINS')}: add it or unset it), or which does not know this vLLM"
            )
        self.session.warm_up()

    def before_step(self, scheduled) -> None:
        """See to what is computed of vLLM's SchedulerOutput; the same on all ranks."""
        raise NotImplementedError

    def _update_states(self, update, scheduled, *arguments, **keywords):
        ended = scheduled.finished_req_ids
        begun = [request.req_id for request in scheduled.scheduled_new_reqs]
        begun += sorted(scheduled.scheduled_cached_reqs.resumed_req_ids)
        self.before_step(scheduled)
        result = update(scheduled, *arguments, **keywords)
        if self.is_drafting_rank:
            with self.session.harmless():
                self._note(ended, begun)
        return result

    def _note(self, ended: set[str], begun: list[str]) -> None:
        """Which requests are gone, and which are new or go on after a preemption, of which vLLM has all tokens now."""
        self.session.ended(ended)
        for name in begun:
            state = self._runner.requests[name]
            if (prompt := state.prompt_token_ids) is not None:
                self.session.started(name, Text(state.sampling_params, prompt, list(state.output_token_ids)))

    def _verify(self, drafts: dict[str, list[int]], scheduled) -> None:
        """Note what the step verifies, and add rows of further paths to it."""
        self.verifying = drafts
        self.last.drafted = sum(map(len, drafts.values()))
        if self.paths:
            self.paths.before_step(scheduled)
            self.last.drafted += len(self.paths.rows) + self.paths.num_draft_tokens

    def _draft_known(self, counts: np.ndarray) -> dict[str, list[int]]:
        """Drafts after a step whose tokens vLLM's texts end in; `counts`: int [rows], how many."""
        with self.session.harmless():
            batch = self._runner.input_batch
            further = self.paths.rows if self.paths else {}
            rows = np.array([row for row, name in enumerate(batch.req_ids) if name not in further])
            counts = counts[rows]
            ends = batch.num_tokens_no_spec[rows]
            places = (ends - counts)[:, None] + np.arange(counts.max(initial=1))
            step = Step(
                request_ids=[batch.req_ids[row] for row in rows],
                emits=counts > 0,
                context=float(ends.mean()),
                had_drafts=bool(self.verifying),
                tokens=batch.token_ids_cpu[rows[:, None], np.minimum(places, batch.token_ids_cpu.shape[1] - 1)],
                counts=counts,
                copied=None,
            )
            return self._draft(step, is_known=True)
        return {}

    def _draft(self, step: Step, is_known: bool) -> dict[str, list[int]]:
        """Tell the session of a step, and draft for the next one."""
        step.max_num_tokens_other_dp_ranks = getattr(self._runner, "sam_max_num_tokens_other_dp_ranks", 0)
        self.session.stepped(step)
        return self.session.draft(step, is_known)


class SamProposer(Adapter):
    """Drafts for the requests of a step when vLLM has its tokens. An error in drafting never fails or changes a
    rollout: the step goes on without drafts, and the error is counted and logged once."""

    is_async = False

    def bind(self, runner) -> None:
        super().bind(runner)
        name = "skip_empty_drafts"
        patches.wrap(runner, "take_draft_token_ids", name, lambda take: take() if self.last.drafted else None)

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
