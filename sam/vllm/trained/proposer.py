"""A draft model under the switch, alone (`draft_model`, `eagle3`) or beside sam (`hybrid`).

Whatever goes wrong in the draft model, sam's drafts stay, and the tokens that come out are the same.
"""

import contextlib
import logging
import time
from dataclasses import replace

import numpy as np
import torch

from sam.config import SpeculationConfig
from sam.drafting.drafts import Drafts
from sam.drafting.position_acceptance import PositionAcceptance
from sam.switch.draft_passes import PassCost, Passes, may_pay, plan_passes
from sam.vllm import patches, warmup_cost
from sam.vllm.proposer import SamProposer
from sam.vllm.trained import COUNTERS
from sam.vllm.trained.made_drafts import MadeDrafts, replaced
from sam.vllm.trained.no_text import NoText
from sam.vllm.trained.passes import DraftModelPasses
from sam.vllm.trained.ranks import FirstRankDecides, check_ranks
from sam.vllm.trained.sampling import Drawn, draft_probabilities

logger = logging.getLogger(__name__)

MAX_ERRORS = 8  # one after the other, after which the draft model rests until the next weight sync


class SwitchedDraftModel(FirstRankDecides):
    """A SamProposer whose drafts a draft model replaces where that pays; a base after this one runs its passes.

    An error of the draft model is counted in `counters["draft_model_errors"]` and logged once. It then rests for that
    step, and after `MAX_ERRORS` in a row until the weights are updated.
    """

    def __init__(self, vllm_config, device, runner=None):
        check_ranks(vllm_config.parallel_config, vllm_config.scheduler_config.async_scheduling)
        super(SamProposer, self).__init__(vllm_config, device, runner)  # vLLM's proposer, which holds the model
        self._prepare(runner)
        SamProposer.__init__(self, vllm_config)
        self._begin(SpeculationConfig.from_vllm(vllm_config))

    def _begin(self, config: SpeculationConfig) -> None:
        self.min_match_len = config.min_match_len
        self.pass_cost = PassCost(np.array([1, 65]), np.array([1.0, 2.0]))  # a guess: 64 tokens double a pass
        self.acceptance = PositionAcceptance(self.num_speculative_tokens)
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self._errors_in_a_row = 0
        self._drafting_ms = 0.0  # of the draft model, within the step being timed
        self._steps_at_sync = 0
        self._sampled: list[list[int]] = []
        self._has_rested = False  # in the step before
        self._drawn: Drawn | None = None  # of the drafts that the next step verifies
        # Beyond it the draft model has no positions.
        self._longest_text = min(self.max_model_len, self.draft_model_config.max_model_len)

    def bind(self, runner) -> None:
        """As SamProposer's; vLLM asks this drafter what its drafts were drawn from."""
        super().bind(runner)
        patches.put(runner, "_get_spec_decode_draft_probs", "draft_probabilities", self._draft_probabilities)

    def _make_drafter(self, config: SpeculationConfig):
        if config.method == "hybrid":
            return super()._make_drafter(config)
        return NoText()

    @classmethod
    def _effective(cls, config: SpeculationConfig) -> SpeculationConfig:
        """What is kept of text serves sam alone."""
        if config.method == "hybrid":
            return config
        return replace(config, scope="group", history_path=None, sharing="none")

    def load_model(self, target_model, *_arguments, **_keywords) -> None:
        """Compile sam's kernels, and load the draft model."""
        SamProposer.load_model(self)
        self.load_draft_model(target_model)

    def measure_passes(self) -> None:
        """Time the draft model's passes for goodput, when the KV cache is there."""
        most = min(self.max_num_tokens, 4 * self.max_batch_size)
        self.pass_cost = PassCost(*warmup_cost.measured(self.time_pass, most, self.agreed))

    @contextlib.contextmanager
    def timing_target(self):
        """Within it vLLM's dummy runs leave the draft model out."""
        self.is_measuring = True
        try:
            yield
        finally:
            self.is_measuring = False

    def weights_updated(self) -> None:
        """The target has new weights: its draft model is tried again."""
        SamProposer.weights_updated(self)
        steps = self.counters["draft_model_steps"]
        if steps == self._steps_at_sync and self.counters["draft_model_rests"] and steps:
            _warn_left_off(self.acceptance.shares)
        self._steps_at_sync, self._errors_in_a_row = steps, 0
        self.acceptance.weights_updated()
        self.restore()

    # vLLM hands over the tokens of the step first, and then what a draft model without a switch would read.
    def prepare_next_token_ids_cpu(self, sampled_token_ids, *_unused):
        """Keep the tokens that each row sampled, which `propose` is not given."""
        self._sampled = sampled_token_ids

    def prepare_inputs(self, common_attn_metadata, *_unused):
        """Nothing: the passes take tokens from the host."""
        return common_attn_metadata, torch.zeros(0, dtype=torch.int64, device=self.device)

    def propose(self, **_unused) -> list[list[int]]:
        """Draft as SamProposer does, from what the host knows."""
        batch = self._runner.input_batch
        return FirstRankDecides.propose(self, self._sampled, batch.num_tokens_no_spec, batch.token_ids_cpu)

    def _observe(self, now, state, emitted) -> None:
        """The time of the draft model's passes is its own, not the step's."""
        self.last.began += self._drafting_ms / 1e3
        self._drafting_ms = 0.0
        SamProposer._observe(self, now, state, emitted)

    def _combine(self, plan, batch, proposed: Drafts) -> Drafts:
        """Of sam's drafts those that the draft model's replace, where that pays."""
        self._learn(batch)
        self._drawn = None
        if self._errors_in_a_row >= MAX_ERRORS:
            self._has_rested = True
            return proposed
        began = time.perf_counter()
        try:
            return self._replaced(self.last.state, plan, batch.rows, batch.ids, batch.lengths, batch.texts, proposed)
        except Exception:
            self._errors_in_a_row += 1
            self.count_model_error()
            return proposed
        finally:
            self._drafting_ms = (time.perf_counter() - began) * 1e3

    def count_model_error(self) -> None:
        """Of the exception being handled: the rollout goes on without the draft model's tokens."""
        self.counters["draft_model_errors"] += 1
        if self.counters["draft_model_errors"] == 1:
            logger.exception("the draft model failed; drafts go on without it (logged once, then counted)")

    def _learn(self, batch) -> None:
        """Compare the last drafts with the text; nothing to do while the draft model rests."""
        if not self.acceptance.is_waiting:
            return
        for row, name, length in zip(batch.rows, batch.ids, batch.lengths, strict=True):
            if self.acceptance.has_draft(name):
                right = self.acceptance.compare(name, batch.texts[row, :length].tolist())
                self.counters["draft_model_accepted_tokens"] += right
        self._forget(self._runner.requests)

    def _forget(self, running) -> None:
        """All requests but those `running`; after a rest all hashes of texts: names may have been given again."""
        self.acceptance.keep_only(running)
        if self.written is not None:
            self.written.keep_only(() if self._has_rested else running)

    def _replaced(self, state, plan, rows, ids, lengths, texts, proposed: Drafts) -> Drafts:
        most = min(plan.budget, self.num_speculative_tokens)
        rule = None if self.min_match_len is None else proposed.match_lengths < self.min_match_len
        if rule is None and not may_pay(self.policy, state, proposed, self.pass_cost):
            return self._rest(proposed)
        room = np.where(self._longest_text - 1 - lengths < most, 0, most)  # no pass beyond the last position
        expected = np.where(np.arange(most) < room[:, None], self.acceptance.expected(ids)[:, :most], 0.0)
        given = self.policy, state, proposed, expected
        # What was missed is looked up only where passes would pay if nothing was.
        if plan_passes(*given, np.ones_like(lengths), self.pass_cost, most, rule).count == 0:
            return self._rest(proposed)
        if self._has_rested:
            self._forget(self._runner.requests)
        missing = self.missing(ids, rows, lengths, texts)
        plan = plan_passes(*given, missing, self.pass_cost, most, rule)
        if plan.count == 0:
            return self._rest(proposed)
        self._has_rested = False
        tokens, drawn = self._run(plan, rows, ids, lengths, missing, texts)
        drafts = replaced(proposed, plan.wanted, tokens, room, expected)
        self._drawn = drawn
        return drafts

    def _draft_probabilities(self, metadata) -> torch.Tensor | None:
        """In place of GPUModelRunner._get_spec_decode_draft_probs: what the drafts of this step were drawn from.

        None takes drafts for certain, which changes no distribution either, whatever they were drawn from.
        """
        drawn, self._drawn = self._drawn, None
        if drawn is None:
            return None
        try:
            ids = self._runner.input_batch.req_ids
            return draft_probabilities(metadata, ids, drawn, self._vocabulary())
        except Exception:
            self.count_model_error()
            return None

    def _rest(self, proposed: Drafts) -> Drafts:
        self._has_rested = True
        self.counters["draft_model_rests"] += 1
        return proposed

    def _run(self, plan: Passes, rows, ids, lengths, missing, texts) -> tuple[list[list[int]], Drawn | None]:
        """The drafts of the requests that want one, and what they were drawn from."""
        chosen = np.flatnonzero(plan.wanted).tolist()
        names, chosen_rows = [ids[i] for i in chosen], [rows[i] for i in chosen]
        began = time.perf_counter()
        made = self.run_passes(names, chosen_rows, lengths[chosen], missing[chosen], texts, plan.count)
        self.counters["draft_model_steps"] += 1
        self.counters["draft_model_passes"] += plan.count
        self.counters["draft_model_requests"] += len(chosen)
        self.counters["draft_model_read_tokens"] += int(missing[chosen].sum())
        drafts = MadeDrafts(plan, names, lengths[chosen], *made)
        drawn = None if drafts.probabilities is None else Drawn(names, drafts.probabilities)
        return self._read_drafts(drafts, began), drawn

    def _read_drafts(self, made: MadeDrafts, began: float) -> list[list[int]]:
        """Wait for the passes, and take what they drafted."""
        tokens, finite = made.tokens.cpu().numpy(), made.finite.cpu().numpy()
        return self._take_drafts(made, tokens, finite, (time.perf_counter() - began) * 1e3)

    def _take_drafts(self, made: MadeDrafts, drafted, finite, milliseconds: float) -> list[list[int]]:
        """Each draft, cut before its first token that is none; it is compared with the text when that is there.

        Args:
            drafted, finite: made's, on the host.
            milliseconds: that the passes took.
        """
        self.pass_cost.observe(made.plan.milliseconds, milliseconds, made.plan.reading)
        valid = finite & (drafted >= 0) & (drafted < self._vocabulary())
        usable = np.cumprod(valid, axis=1).sum(axis=1)
        if not valid.all():
            self._count_invalid(int((usable < made.plan.count).sum()))
        tokens = [row[:length] for row, length in zip(drafted.tolist(), usable.tolist(), strict=True)]
        for name, length, draft in zip(made.names, made.lengths.tolist(), tokens, strict=True):
            self.acceptance.drafted(name, length, draft)
        self.counters["draft_model_drafted_tokens"] += sum(map(len, tokens))
        self._errors_in_a_row = 0
        return tokens

    def _vocabulary(self) -> int:
        return self._runner.model_config.get_vocab_size()

    def _count_invalid(self, drafts: int) -> None:
        if self.counters["draft_model_invalid_drafts"] == 0:
            logger.warning("the draft model gave no token where one was expected: drafts end there (logged once)")
        self.counters["draft_model_invalid_drafts"] += drafts


class TrainedProposer(SwitchedDraftModel, DraftModelPasses):
    """With a language model of its own: vLLM's method `draft_model`."""

    def bind(self, runner) -> None:
        """Take the sampled tokens as SamProposer does: vLLM gathers what a draft model reads in every step."""
        super().bind(runner)

        def propose_draft_token_ids(_scheduler_output, sampled_token_ids, *_unused):
            self._sampled = sampled_token_ids
            return self.propose()

        patches.put(runner, "propose_draft_token_ids", "draft_probabilities", propose_draft_token_ids)


def _warn_left_off(shares: np.ndarray) -> None:
    if not getattr(_warn_left_off, "said", False):
        _warn_left_off.said = True
        logger.warning(
            "the draft model was left off for a whole rollout: of its tokens %s are accepted by position, which does "
            "not pay for its passes (said once; it is tried again after every weight sync)",
            ", ".join(f"{share:.0%}" for share in shares),
        )
