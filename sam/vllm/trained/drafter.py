"""A draft model beside sam: for which requests of a step it drafts in sam's place, and what comes of that.

Each request takes the source that expects more accepted tokens of its draft. The number of passes is the one with the
highest goodput (sam.switch.policies), with the time of the passes added to every step that verifies any; no pass at all
is one of the choices. Whatever goes wrong in the draft model, sam's drafts stay, and the tokens that come out are the
same.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from sam.drafting.position_acceptance import PositionAcceptance
from sam.drafting.texts import Drafts
from sam.guard import guard
from sam.switch.policies import MIN_GAIN_OFF, choose_lengths
from sam.switch.step_cost import StepState
from sam.verify.exact import sent
from sam.vllm.trained.passes import Batch, Chosen, ModelPasses, begin_copy

logger = logging.getLogger(__name__)

FILLER = 0  # any token id: where it is the token that is sampled, accepting it is right
MAX_ERRORS = 8  # one after the other, after which the draft model rests until the next weight sync
COUNTED = "steps passes read_tokens drafted_tokens accepted_tokens errors invalid_drafts"
COUNTERS = tuple(f"draft_model_{name}" for name in COUNTED.split())  # docs/metrics.md
UPDATE = 0.1  # weight of the last passes in the correction of their time
# Steps over which the time of reading what was missed is spread in a plan. One step alone would never pay for it, and
# what is missed grows with every step that the draft model rests.
CATCH_UP_STEPS = 32


class Passes(NamedTuple):
    """What a draft model is to do."""

    count: int  # passes, each of which brings one draft token; 0: it rests
    wanted: np.ndarray  # bool [requests], which requests it drafts for
    milliseconds: float = 0.0  # that the passes are expected to take


class PassCost:
    """Milliseconds of a draft model's passes by tokens: those measured for rising sizes, times a factor that is learnt.

    Example:
        >>> cost = PassCost(np.array([1, 101]), np.array([1.0, 2.0]))
        >>> cost.ms(np.array([0, 51, 201])).tolist()  # beyond the table the last slope goes on
        [0.0, 1.5, 3.0]
        >>> cost.observe(expected=1.0, measured=2.0)
        >>> cost.ms(np.array([51])).round(3).tolist()
        [1.65]
    """

    def __init__(self, sizes: np.ndarray, milliseconds: np.ndarray):
        self._sizes = sizes
        self._milliseconds = np.maximum.accumulate(milliseconds)
        self._factor = 1.0

    def ms(self, num_tokens: np.ndarray) -> np.ndarray:
        """Of one pass over each number of tokens; 0 without any."""
        value = np.interp(num_tokens, self._sizes, self._milliseconds)
        if len(self._sizes) > 1:
            slope = np.diff(self._milliseconds[-2:]) / np.diff(self._sizes[-2:])
            value += slope * np.maximum(0, num_tokens - self._sizes[-1])
        return np.where(num_tokens > 0, self._factor * value, 0.0)

    def observe(self, expected: float, measured: float) -> None:
        """Learn from passes that were expected to take `expected` milliseconds."""
        self._factor *= 1.0 + UPDATE * (min(10.0, max(0.1, measured / expected)) - 1.0)


def plan_passes(
    policy: Any, state: StepState, drafts: Drafts, expected: np.ndarray, missing: np.ndarray, cost: PassCost
) -> Passes:
    """The best number of passes, and whom for.

    Args:
        policy, state: of sam.switch; a policy without step costs asks for as many passes as there may be.
        drafts: sam's, one of each request.
        expected: float [requests, most], probability that the draft model's token at each position of a draft and all
            before it are accepted; 0 where a request has no room for a draft.
        missing: int [requests], tokens that the draft model has yet to read.
    """
    most = expected.shape[1]
    sums = np.concatenate([[0.0], np.cumsum(drafts.acceptance, dtype=np.float64)])
    of_sam = sums[drafts.offsets[1:]] - sums[drafts.offsets[:-1]]
    wanted = (np.cumsum(expected, axis=1) > of_sam[:, None]) & (expected[:, :1] > 0)
    each = cost.ms(wanted.sum(axis=0))  # of one pass
    first = cost.ms(missing @ wanted)
    catching_up = np.maximum(0.0, first - each)
    count = most
    if hasattr(policy, "step_ms"):
        passes_ms = np.arange(1, most + 1) * each + catching_up / CATCH_UP_STEPS
        count = _best_count(drafts, expected, wanted, state.running, policy.step_ms(state), passes_ms)
    if count == 0 or not wanted[:, count - 1].any():
        return Passes(0, np.zeros(len(expected), bool))
    return Passes(count, wanted[:, count - 1], float(count * each[count - 1] + catching_up[count - 1]))


def _best_count(drafts: Drafts, expected, wanted, running: int, step_ms: np.ndarray, passes_ms: np.ndarray) -> int:
    """The number of passes with the highest goodput, of a step with `running` requests.

    Args:
        wanted: bool [requests, most], for whom one pass, two, ... are.
        step_ms: float64 [n + 1], milliseconds of a step with 0 to n draft tokens.
        passes_ms: float64 [most], milliseconds of one pass, two, ...
    """
    request_of = np.repeat(np.arange(len(expected)), np.diff(drafts.offsets))
    goodput = []
    for count in range(len(passes_ms) + 1):
        acceptance = drafts.acceptance
        cost = step_ms
        if count > 0:
            own = wanted[:, count - 1]
            acceptance = np.concatenate([acceptance[~own[request_of]], expected[own, :count].ravel()])
            cost = step_ms + passes_ms[count - 1]
            cost[0] = step_ms[0]
        as_a_draft = np.array([0, len(acceptance)])  # of all requests: only how many tokens are taken matters
        lengths, accepted = choose_lengths(acceptance.astype(np.float32), as_a_draft, running, cost, MIN_GAIN_OFF)
        goodput.append((running + accepted) / cost[lengths.sum()])
    return int(np.argmax(goodput))


class ComingDrafts:
    """Drafts on the device and on their way to the host, which has fillers in their places until they arrive.

    Args:
        plan, batch, made: of the passes that began with the event `began`.
        vocabulary: of the target; FILLER stands for what is none of its tokens, as any may be verified.
    """

    def __init__(self, plan: Passes, batch: Batch, made: Chosen, began, vocabulary: int):
        self.plan = plan
        self.batch = batch
        self._began = began
        is_token = (made.tokens >= 0) & (made.tokens < vocabulary)
        self._inputs = made.tokens.where(is_token, FILLER).to(torch.int32)
        self._tokens = begin_copy(made.tokens)
        self._ended = recorded_event()

    def arrive(self) -> tuple[np.ndarray, float]:
        """Tokens, int64 [requests, passes], and the milliseconds of the passes, once the copy is over."""
        self._ended.synchronize()
        return self._tokens.numpy(), self._began.elapsed_time(self._ended)

    def put(self, input_ids: torch.Tensor, request_ids: list[str], ends: np.ndarray, drafts: dict[str, list[int]]):
        """Put them into a step's input, int32 [tokens].

        Args:
            request_ids, ends: of the step's batch, and where the tokens of each end in the input, its draft's last.
            drafts: in the step, by request; those that are coming may be cut.
        """
        row_of = {name: row for row, name in enumerate(self.batch.ids)}
        count = self.plan.count
        to = []
        places = []
        for name, end in zip(request_ids, ends.tolist(), strict=True):
            if name in row_of and name in drafts:
                begin = end - len(drafts[name])
                length = min(len(drafts[name]), count)
                to += range(begin, begin + length)
                places += range(row_of[name] * count, row_of[name] * count + length)
        if to:
            to, places = sent(torch.tensor([to, places]), input_ids.device)
            input_ids[to] = self._inputs.flatten()[places]


def recorded_event():
    """An event of the device, after all that it was asked so far."""
    event = torch.Event(enable_timing=True)
    event.record()
    return event


class TrainedDrafter:
    """Drafts with a draft model where that pays.

    An error of the draft model is counted in `counters["draft_model_errors"]` and logged once. It then rests for that
    step, and after `MAX_ERRORS` in a row until the weights are updated.

    Args:
        passes: of the draft model.
        num_speculative_tokens: longest draft.
        counters: where COUNTERS are counted.

    Attributes:
        pass_cost: what passes take, a guess until they are timed: 64 tokens double a pass.
        reads_later: whether drafts stay on the device until the step that verifies them has ended.
        coming: drafts that the host does not know yet.
    """

    def __init__(self, passes: ModelPasses, num_speculative_tokens: int, counters: dict[str, int]):
        self.passes = passes
        self.counters = counters
        self.pass_cost = PassCost(np.array([1, 65]), np.array([1.0, 2.0]))
        self.acceptance = PositionAcceptance(num_speculative_tokens)
        self.reads_later = False
        self.coming: ComingDrafts | None = None
        self.counters.update(dict.fromkeys(COUNTERS, 0))
        self._errors_in_a_row = 0
        self._milliseconds = 0.0  # of drafting, within the step under way
        # float32 [passes, vocabulary] that each draft was drawn from which the next step verifies as drawn.
        self._drawn: dict[str, torch.Tensor] = {}

    def weights_updated(self) -> None:
        """The target has new weights: the draft model is tried again."""
        self._errors_in_a_row = 0
        self.coming = None
        self.acceptance.weights_updated()
        self.passes.restore()

    def combine(
        self, policy: Any, state: StepState, budget: int, ids: list[str], texts: list[np.ndarray], proposed: Drafts
    ) -> Drafts:
        """Sam's drafts, up to `budget` tokens of each request, with those of the draft model in place of some where
        that pays.

        Args:
            policy, state: as of `plan_passes`.
            texts: int32 [length] each, of the requests `ids`.
            proposed: sam's, in their order.
        """
        began = time.perf_counter()
        self._drawn = {}
        with self.harmless():
            batch = Batch.of(self.passes.runner, ids, texts)
            self._learn(batch)
            if self._errors_in_a_row < MAX_ERRORS:
                proposed = self._combine(policy, state, budget, batch, proposed)
        self._milliseconds = (time.perf_counter() - began) * 1e3
        return proposed

    def _combine(self, policy: Any, state: StepState, budget: int, batch: Batch, proposed: Drafts) -> Drafts:
        has_room = self.passes.longest_text - 1 - batch.lengths >= budget  # no pass beyond the last position
        expected = self.acceptance.expected(batch.ids)[:, :budget] * has_room[:, None]
        plan_with = functools.partial(plan_passes, policy, state, proposed, expected, cost=self.pass_cost)
        # What was missed is looked up only where passes would pay if nothing was.
        if plan_with(missing=np.ones_like(batch.lengths)).count == 0:
            return proposed
        missing = self.passes.missing(batch)
        plan = plan_with(missing=missing)
        if plan.count == 0:
            return proposed
        return _replaced(proposed, plan.wanted, self._draft(plan, batch, missing), expected)

    @contextlib.contextmanager
    def harmless(self) -> Iterator[None]:
        """Count errors within: the rollout goes on without the draft model's tokens."""
        with guard(logger, self.counters, "draft_model_errors", "the draft model failed; drafts go on without it"):
            yield
            return
        self._errors_in_a_row += 1

    def arrive(self) -> float:
        """Learn drafts that were on their way; the milliseconds of drafting within the step that has just ended."""
        coming = self.coming
        self.coming = None
        with self.harmless():
            if coming is not None:
                drafted, self._milliseconds = coming.arrive()
                self._take(coming.plan, coming.batch, drafted, self._milliseconds)
        taken = self._milliseconds
        self._milliseconds = 0.0
        return taken

    def fill_in(self, ends: np.ndarray, drafts: dict[str, list[int]]) -> None:
        """Put drafts that are coming into a step's input; arguments as of ComingDrafts.put."""
        if self.coming is None or not drafts:
            return
        drawn = self._drawn  # of an error: fillers are verified, which nobody drew
        self._drawn = {}
        with self.harmless():
            runner = self.passes.runner
            self.coming.put(runner.input_ids.gpu, runner.input_batch.req_ids[: len(ends)], ends, drafts)
            self._drawn = drawn

    def draft_probabilities(self, metadata) -> torch.Tensor | None:
        """In place of GPUModelRunner._get_spec_decode_draft_probs: what a step's drafts were drawn from, one after the
        other, float32 [draft tokens, vocabulary]; those of sam were certain. None takes all of them for certain, which
        changes no distribution either, whatever they were drawn from."""
        drawn = self._drawn
        self._drawn = {}
        if not drawn:
            return None
        with self.harmless():
            tokens = metadata.draft_token_ids.to(torch.int64)
            begin = 0
            probabilities = torch.zeros((len(tokens), self._vocabulary()), dtype=torch.float32, device=tokens.device)
            probabilities.scatter_(1, tokens.clamp(0, probabilities.shape[1] - 1)[:, None], 1.0)
            for name, count in zip(self.passes.runner.input_batch.req_ids, metadata.num_draft_tokens, strict=False):
                if name in drawn:
                    own = drawn[name][:count, : probabilities.shape[1]]
                    probabilities[begin : begin + count] = 0.0
                    probabilities[begin : begin + count, : own.shape[1]] = own
                begin += count
            return probabilities
        return None

    def _learn(self, batch: Batch) -> None:
        """Compare the last drafts with the text, and forget requests that are gone; nothing to do in a rest."""
        if not self.acceptance.waiting:
            return
        for name, row, length in zip(batch.ids, batch.rows, batch.lengths, strict=True):
            if name in self.acceptance.waiting:
                right = self.acceptance.compare(name, batch.texts[row, :length])
                self.counters["draft_model_accepted_tokens"] += right
        for known in (self.acceptance, self.passes.written):
            if known is not None:
                known.keep_only(self.passes.runner.requests)

    def _draft(self, plan: Passes, batch: Batch, missing: np.ndarray) -> list[list[int]]:
        """The drafts of the requests that want one; fillers where the device will put them in."""
        at = np.flatnonzero(plan.wanted)
        runner = self.passes.runner
        ids = [batch.ids[i] for i in at]
        rows = np.array(batch.rows)[at]
        to_read = missing[at]
        drafting = batch._replace(ids=ids, rows=rows, lengths=batch.lengths[at])
        # Penalties, bad words and budgets of thinking count a step's drafts on the host.
        of_step = runner.input_batch
        counted = not of_step.no_penalties or of_step.bad_words_token_ids or of_step.thinking_budget_state_holder
        later = self.reads_later and not counted
        began = recorded_event() if later else time.perf_counter()
        made = self.passes.draft(drafting, to_read, plan.count)
        self.counters["draft_model_steps"] += 1
        self.counters["draft_model_passes"] += plan.count
        self.counters["draft_model_read_tokens"] += int(to_read.sum())
        if made.probabilities is not None:
            self._drawn = dict(zip(ids, made.probabilities, strict=True))
        if later:
            self.coming = ComingDrafts(plan, drafting, made, began, self._vocabulary())
            return [[FILLER] * plan.count for _ in ids]
        drafted = made.tokens.cpu().numpy()
        return self._take(plan, drafting, drafted, (time.perf_counter() - began) * 1e3)

    def _take(self, plan: Passes, batch: Batch, drafted: np.ndarray, milliseconds: float) -> list[list[int]]:
        """Each draft, cut before its first token that is none; it is compared with the text when that is there."""
        self.pass_cost.observe(plan.milliseconds, milliseconds)
        valid = (drafted >= 0) & (drafted < self._vocabulary())
        usable = np.cumprod(valid, axis=1).sum(axis=1)
        if not valid.all():
            if self.counters["draft_model_invalid_drafts"] == 0:
                logger.warning("the draft model gave no token where one was expected: drafts end there (logged once)")
            self.counters["draft_model_invalid_drafts"] += int((usable < plan.count).sum())
        tokens = [row[:length] for row, length in zip(drafted.tolist(), usable.tolist(), strict=True)]
        for name, length, draft in zip(batch.ids, batch.lengths.tolist(), tokens, strict=True):
            self.acceptance.drafted(name, length, draft)
        self.counters["draft_model_drafted_tokens"] += sum(map(len, tokens))
        self._errors_in_a_row = 0
        return tokens

    def _vocabulary(self) -> int:
        return self.passes.runner.model_config.get_vocab_size()


def _replaced(proposed: Drafts, wanted: np.ndarray, tokens: list[list[int]], expected: np.ndarray) -> Drafts:
    """Sam's drafts, those of the `wanted` requests replaced by `tokens`, one draft of each of them."""
    ids, acceptance = (np.split(values, proposed.offsets[1:-1]) for values in (proposed.token_ids, proposed.acceptance))
    for i, draft in zip(np.flatnonzero(wanted), tokens, strict=True):
        ids[i] = np.array(draft, np.int32)
        acceptance[i] = expected[i, : len(draft)].astype(np.float32)
    offsets = np.cumsum([0, *map(len, ids)]).astype(np.int64)
    return Drafts(np.concatenate(ids), offsets, np.concatenate(acceptance))
