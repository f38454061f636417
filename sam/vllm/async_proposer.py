"""SamProposer under asynchronous scheduling; alone, through the door that vLLM keeps for its drafter `ngram_gpu`.

vLLM schedules step n + 1 before it knows the tokens of step n, with placeholders for drafts. Here the host decides:

- Without drafts a step waits for nothing and copies nothing. The automaton learns from vLLM's own copy of the sampled
  tokens, once that has arrived.
- With drafts it waits once, for that same copy, just before the next step prepares its input: vLLM has scheduled that
  step and handed on the one before while the device was busy. Drafts then travel with the next step's input tokens.
  Since all counts are known on the host by then, vLLM need not correct any on the device.

Between the phases lies one step: drafts are asked for in it, and come with the next.

With tensor parallelism the first rank drafts, where clocks decide whether a step's tokens have arrived. The others ask
no clock: each is given its drafts before the step that verifies them, and waits for its own copy of the tokens where
drafts are verified, and before the first that are.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU

from sam.engine.session import MAX_STEPS_BEHIND
from sam.vllm import hooks, ranks
from sam.vllm.proposer import SamProposer


@dataclass
class SampledStep:
    """The tokens that a step sampled, on their way to the host."""

    request_ids: list[str]  # one for each row of the batch
    starts: np.ndarray  # int32 [rows], place of each row's first token in its text, the prompt's tokens counted
    emits: np.ndarray  # bool [rows], False for a row that is still in its prompt
    tokens: torch.Tensor  # int [rows, 1 + longest draft] on the host, padded with -1; valid once `copied` is over
    copied: Any  # the event of that copy, vLLM's own
    counts: np.ndarray | None = None  # int [rows], tokens of each row once they are read; 0 for one still in its prompt
    lists: list[list[int]] = field(default_factory=list)  # these tokens

    @property
    def had_drafts(self) -> bool:
        """Whether it verified drafts: what became of them has to be known before the next step."""
        return self.tokens.shape[-1] > 1

    def read(self) -> None:
        """Learn what came out."""
        self.counts = (self.tokens.numpy() >= 0).sum(axis=1) * self.emits
        self.lists = [row[:count] for row, count in zip(self.tokens.tolist(), self.counts.tolist(), strict=True)]


class AsyncDrafting(SamProposer):
    """A SamProposer whose steps are scheduled before the tokens of the step before are known."""

    def __init__(self, vllm_config):
        ranks.check_async(vllm_config.parallel_config)
        super().__init__(vllm_config)
        self.counters.update({"waited_steps": 0, "late_steps": 0})
        self.verifying: dict[str, list[int]] = {}  # drafts of the step under way, by request
        self.accepted: dict[str, list[int]] = {}  # tokens that came out for them
        self.on_read: Callable[[], None] | None = None  # a StepRecorder's, once a step's tokens are known
        self._drafts: dict[str, list[int]] = {}  # of the next step
        self._unread: SampledStep | None = None  # the last step, until it is waited for
        # Steps without drafts, not taken from vLLM's copy yet; so many only if planning fails in every step.
        self._pending: deque[SampledStep] = deque(maxlen=2 * MAX_STEPS_BEHIND)
        self._had_placeholders = False
        self._waits = self._waited = False  # whether the last step is one that is waited for, and the one before it
        self._group: Any = None  # of the ranks that verify the first one's drafts

    def bind(self, runner) -> None:
        super().bind(runner)
        self._group = ranks.tensor_parallel_group(runner)
        hooks.install_async(runner, self)

    def after_step(self, output) -> None:
        """Learn a step's tokens and draft for the next one, by vLLM's AsyncGPUModelRunnerOutput, whose copy to the host
        is under way; where it waits for them, `read_awaited` does."""
        batch, rows = self._runner.input_batch, self._runner.input_batch.num_reqs
        emits = ~self._runner.discard_request_mask.np[:rows]
        starts = batch.num_tokens_no_spec[:rows] - emits  # vLLM has counted one token for each
        tokens, copied = output.sampled_token_ids_cpu, output.async_copy_ready_event
        step = SampledStep(batch.req_ids.copy(), starts, emits, tokens, copied)
        if not self.is_drafting_rank:
            self._unread = step
            self.verifying = {}  # what came out for them is known a step later: no recorder of this rank asks
            return
        self._drafts, self.accepted = {}, {}
        self._waits = step.had_drafts or self.wants_drafts
        if self._waits:
            self._unread = step
        else:
            self._take_step(step)

    @property
    def is_awaiting(self) -> bool:
        """Whether the last step's tokens, and what they say about its drafts, are still to be read."""
        return self.is_drafting_rank and self._unread is not None

    def read_awaited(self, is_timed: bool = True) -> None:
        """Wait for the last step's tokens, if it is one that is waited for, learn them and draft; may be called again.
        Not `is_timed` where the engine may have been idle since that step."""
        if not self.is_awaiting:
            return
        step, self._unread = self._unread, None
        if not is_timed:
            self.last.state, self.last.valid_for_steps = None, 0
        self._wait(step)
        self._take_step(step)
        if self.on_read:
            self.on_read()

    def _take_step(self, step: SampledStep) -> None:
        """Write down what came out, if it is known, and draft."""
        batch, is_known = self._runner.input_batch, step.counts is not None
        if not is_known:
            self._pending.append(step)
        else:
            self._write(step, is_last=True)
            self.accepted = dict(zip(step.request_ids, step.lists, strict=True))
        emitted = (step.counts if is_known else step.emits).tolist()
        drafts = self._propose(emitted, batch.num_tokens_no_spec, batch.token_ids_cpu)
        self._drafts = {name: draft for name, draft in zip(step.request_ids, drafts, strict=True) if draft}
        if is_known or self._drafts:
            # All tokens are on the host: the next step takes its input from there, drafts included.
            batch.prev_sampled_token_ids = None
        self._waited = self._waits

    def _wait(self, step: SampledStep) -> None:
        """The one wait of a step with drafts. If the copy fails the device is lost, to vLLM as well."""
        self.counters["waited_steps"] += 1
        step.copied.synchronize()
        step.read()

    def _observe(self, now: float, state, emitted: list[int]) -> None:
        # Between a step that waited for the device and one that did not lies more or less than one step's time. And one
        # that waited and had no drafts is neither a step with drafts nor a plain one, which waits for nobody.
        if self._waits == self._waited and (self.last.drafted or not self._waits):
            super()._observe(now, state, emitted)

    def _known_lengths(self, lengths: np.ndarray) -> np.ndarray | None:
        self._take_arrived()
        if not self._pending:
            return lengths
        if self.wants_drafts:  # asked for in this step; the next one waits
            self.counters["late_steps"] += 1
            return None
        known, row_of = lengths.copy(), self._runner.input_batch.req_id_to_index
        for step in self._pending:
            for request_id, start in zip(step.request_ids, step.starts.tolist(), strict=True):
                if (row := row_of.get(request_id)) is not None:
                    known[row] = min(known[row], start)
        return known

    def _take_arrived(self) -> None:
        """Write down the tokens whose copy is over; waits for none."""
        while self._pending and self._pending[0].copied.query():
            step = self._pending.popleft()
            step.read()
            self._write(step)

    def _write(self, step: SampledStep, is_last: bool = False) -> None:
        """Put tokens where vLLM has them when it schedules synchronously; it left a placeholder for each row.
        `is_last`: the batch's rows are still this step's."""
        batch, requests = self._runner.input_batch, self._runner.requests
        rows = np.full(len(step.request_ids), -1)  # of the batch; -1: nothing to write there
        row_of = batch.req_id_to_index.get
        named = zip(step.request_ids, step.starts.tolist(), step.lists, strict=True)
        for index, (request_id, start, tokens) in enumerate(named):
            state = requests.get(request_id) or self.tracked.states.get(request_id)
            if not tokens or state is None:
                continue
            place, output = start - state.num_prompt_tokens, state.output_token_ids
            if place < len(output):
                # Already there: of a request preempted since then, from the scheduler; of a penalised one, in `output`.
                if is_last or output[place] < 0:
                    output[place : place + 1] = tokens
                rows[index] = row_of(request_id, -1)
        counts = np.where(rows < 0, 0, step.counts)
        of, offset = np.nonzero(np.arange(step.tokens.shape[1]) < counts[:, None])
        to = rows[of], step.starts[of] + offset
        values = step.tokens.numpy()[of, offset]
        if is_last:
            batch.is_token_ids[to] = True
            written = counts > 0
            batch.num_tokens_no_spec[rows[written]] = (step.starts + counts)[written]
        else:
            values = np.where(batch.token_ids_cpu[to] < 0, values, batch.token_ids_cpu[to])
        batch.token_ids_cpu[to] = values

    def before_step(self, scheduler_output) -> None:
        """Put true counts and drafts into the model runner's own copy of vLLM's SchedulerOutput; the same on all
        ranks."""
        # No request goes on from the step before: the engine was idle in between.
        self.read_awaited(is_timed=bool(scheduler_output.scheduled_cached_reqs.req_ids))
        scheduled = scheduler_output.scheduled_spec_decode_tokens
        drafts = [self._drafts.get(name, [])[: len(room)] for name, room in scheduled.items()]
        if drafts and self._group:  # the requests, and their order, are the same on all ranks
            drafts = self._group.broadcast_object(drafts)
        self._catch_up(any(drafts))
        if self._had_placeholders:
            self._correct_counts(scheduler_output)
        self._had_placeholders = bool(scheduled)
        self.verifying = {name: draft for name, draft in zip(scheduled, drafts, strict=True) if draft}
        for name, room in list(scheduled.items()):
            missing = len(room) - len(self.verifying.get(name, ()))
            scheduler_output.num_scheduled_tokens[name] -= missing
            scheduler_output.total_num_scheduled_tokens -= missing
            del scheduled[name]
        scheduled.update(self.verifying)
        self.last.drafted = sum(map(len, self.verifying.values()))
        if self.paths:
            self.paths.before_step(scheduler_output)

    def weights_updated(self) -> None:
        self.read_awaited(is_timed=False)
        super().weights_updated()

    def _catch_up(self, has_drafts: bool) -> None:
        """Where another rank drafts: wait for the last step's tokens, if drafts were among them or follow them now."""
        if self._unread is None:
            return
        step, self._unread = self._unread, None
        if has_drafts or step.had_drafts:
            self._wait(step)
            self._write(step, is_last=True)
            self._runner.input_batch.prev_sampled_token_ids = None

    def _correct_counts(self, scheduler_output) -> None:
        """The scheduler took every placeholder of the last step for an accepted token."""
        cached, rows = scheduler_output.scheduled_cached_reqs, self._runner.input_batch.req_id_to_index
        computed, outputs = list(cached.num_computed_tokens), list(cached.num_output_tokens)
        for index, request_id in enumerate(cached.req_ids):
            if request_id not in rows or request_id in cached.resumed_req_ids:
                continue
            state = self._runner.requests[request_id]
            state.prev_num_draft_len = 0
            rejected = max(0, outputs[index] - len(state.output_token_ids))
            computed[index] -= rejected
            outputs[index] -= rejected
        scheduler_output.scheduled_cached_reqs = replace(
            cached, num_computed_tokens=computed, num_output_tokens=outputs
        )

    def take_draft_token_ids(self) -> DraftTokenIds:
        """Drafts of the step under way, for structured outputs."""
        return DraftTokenIds(list(self.verifying), [list(draft) for draft in self.verifying.values()])


class AsyncSamProposer(AsyncDrafting, NgramProposerGPU):
    """What vLLM takes for its NgramProposerGPU, whose kernel it neither compiles nor runs."""

    def __init__(self, vllm_config, _device, _runner=None):
        super().__init__(vllm_config)

    def update_token_ids_ngram(self, sampled_token_ids: torch.Tensor, *_unused):
        """Called by vLLM in place of its own bookkeeping on the device, with int32 [rows, 1 + longest draft]: a view of
        each row's first token, the next step's input if nobody waits; and two values that its own drafter needs."""
        return sampled_token_ids[:, 0], None, None

    def propose(self, *_unused) -> tuple[list, None]:
        """Called by vLLM before the tokens are copied, and given nothing: `after_step` drafts."""
        return [], None
