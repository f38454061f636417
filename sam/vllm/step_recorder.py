"""What every engine step did: running requests, drafts, accepted tokens, milliseconds.

Works for any drafter and for none, so that runs can be compared: it reads what vLLM scheduled and what came out, not
who drafted.
"""

import functools
import time
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from sam.engine.requests import accepted_tokens, turn_of
from sam.record.engine_steps import PER_STEP, TURNS, EngineSteps
from sam.vllm import patches, warmup_cost

RUNNING, EMITTED = (list(PER_STEP).index(name) for name in ("running", "emitted"))


@dataclass
class RecordedStep:
    """The step under way."""

    scheduled: Any = None  # vLLM's SchedulerOutput
    began: float = 0.0  # seconds; if the engine was not idle, when the step before ended
    is_on: bool | None = None  # whether the policy lets requests speculate; None of a drafter without one
    stages: dict[str, float] = field(default_factory=lambda: {"forward": 0.0, "verify": 0.0, "draft": 0.0})  # seconds
    replayed: bool = False  # whether the forward pass replayed a graph
    drafts: dict[str, list[int]] | None = None  # that it verifies, where what was scheduled does not say so
    ended: float = 0.0


class StepRecorder:
    """Records a model runner's engine steps from the moment it is attached.

    A step's wall time runs from the end of the step before it, so that scheduling and output handling count;
    the first step after an idle time counts from its own start.
    """

    def __init__(self, runner):
        self._runner = runner
        speculative = runner.vllm_config.speculative_config
        self._draft_length = speculative.num_speculative_tokens if speculative else 0
        self._has_graphs = warmup_cost.graph_mode(runner.vllm_config) is not None
        self._step = RecordedStep()
        self._last_end = 0.0  # the engine was idle before the step
        self._clear()

    @classmethod
    def attach(cls, runner) -> Self:
        """Wrap the runner's stages on this instance; attaching twice gives the same recorder."""
        if (existing := getattr(runner, "_sam_step_recorder", None)) is not None:
            return existing
        kind = cls if hasattr(runner, "_sample") else SecondRunnersRecorder
        recorder = runner._sam_step_recorder = kind(runner)
        recorder._wrap()
        return recorder

    def _wrap(self) -> None:
        runner = self._runner
        name = "record_steps"
        patches.wrap(runner, "execute_model", name, self._execute_model)
        patches.before(runner, "_model_forward", name, self._note_replay)
        patches.wrap(runner, "_sample", name, functools.partial(self._timed, "verify"))
        patches.wrap(runner, "propose_draft_token_ids", name, functools.partial(self._timed, "draft"))
        patches.wrap(runner, "sample_tokens", name, self._sample_tokens)

    def _of_drafter(self, attribute: str, default: Any = None) -> Any:
        """Of this project's drafter; the default with another one or none."""
        return getattr(getattr(self._runner, "drafter", None), attribute, default)

    def take(self) -> EngineSteps:
        """The engine steps since the last call."""
        if read_awaited := self._of_drafter("read_awaited"):
            read_awaited(is_timed=False)
        by_drafted = self._verified.sum(axis=(0, 2))
        by_emitted = self._verified.sum(axis=(0, 1))
        steps = EngineSteps(
            *zip(*self._rows, strict=True),
            drafted_at=_longer(by_drafted),
            accepted_at=_longer(by_emitted[1:]),
            turn_steps=self._verified.sum(axis=(1, 2)),
            turn_emitted=self._verified.sum(axis=1) @ np.arange(len(by_emitted)),
            asynchronous=bool(self._runner.scheduler_config.async_scheduling),
            has_graphs=self._has_graphs,
            preemptions=self._preemptions,
            counters=dict(self._of_drafter("counters", {})),
        )
        self._clear()
        return steps

    def progress(self) -> tuple[int, int, int, int]:
        """Since the last call of `take`: requests of the last step, tokens, verifications, tokens that those gave."""
        by_emitted = self._verified.sum(axis=(0, 1))
        tokens = sum(row[EMITTED] for row in self._rows)
        last = self._rows[-1][RUNNING] if self._rows else 0
        return last, tokens, int(by_emitted.sum()), int(by_emitted @ np.arange(len(by_emitted)))

    def _clear(self) -> None:
        self._preemptions = 0
        self._rows: list[tuple] = []  # in the order of EngineSteps' columns
        # Verifications by turn, draft tokens and tokens that came out.
        self._verified = np.zeros((TURNS, self._draft_length + 1, self._draft_length + 2), dtype=np.int64)

    def _timed(self, stage: str, function, *args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._step.stages[stage] += time.perf_counter() - started

    def _execute_model(self, function, scheduler_output, *args, **kwargs):
        self._step = RecordedStep(
            scheduler_output, time.perf_counter(), getattr(self._of_drafter("last"), "is_on", None)
        )
        self._note_preemptions(scheduler_output)
        result = self._timed("forward", function, scheduler_output, *args, **kwargs)
        # No request goes on from the step before: the time between the two steps was idle.
        if scheduler_output.total_num_scheduled_tokens == 0 or not scheduler_output.scheduled_cached_reqs.req_ids:
            self._last_end = 0.0
        return result

    def _note_preemptions(self, scheduler_output) -> None:
        self._preemptions += len(getattr(scheduler_output, "preempted_req_ids", None) or ())

    def _note_replay(self, *_) -> None:
        """By the mode with which vLLM's forward context tells a captured model whether to replay: vLLM's and
        vllm-ascend's dispatchers name a mode only if a graph of the step's size has been captured."""
        self._step.replayed = get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.NONE

    def _sample_tokens(self, function, *args, **kwargs):
        output = function(*args, **kwargs)
        step = self._step
        self._step = RecordedStep()
        if step.scheduled is not None and (hasattr(output, "sampled_token_ids") or hasattr(output, "get_output")):
            step.began = self._last_end or step.began
            step.ended = time.perf_counter()
            self._last_end = step.ended
            self._record_when_known(step, output)
        return output

    def _record_when_known(self, step: RecordedStep, output) -> None:
        record = functools.partial(self._record, step, output)
        if self._of_drafter("is_awaiting"):  # what came out is known later
            self._runner.drafter.on_read = record
        else:
            record()

    def _record(self, step: RecordedStep, output) -> None:
        """Add a step."""
        scheduled = step.scheduled
        if self._of_drafter("on_read") is not None:
            self._runner.drafter.on_read = None
        running = len(scheduled.num_scheduled_tokens)
        if (sampled := getattr(output, "sampled_token_ids", None)) is None:
            # Asynchronous scheduling: tokens are on the device. Every row that has its whole prompt gives one, but for
            # accepted drafts, which a drafter on the host knows.
            drafts = self._of_drafter("verifying", {})
            tokens_of = self._of_drafter("accepted", {})
            requests = ((self._request(name), count) for name, count in scheduled.num_scheduled_tokens.items())
            prefilling = sum(
                request.num_computed_tokens + count < request.num_prompt_tokens for request, count in requests
            )
            emitted = running - prefilling + sum(len(tokens_of[request_id]) - 1 for request_id in drafts)
        else:
            drafts = scheduled.scheduled_spec_decode_tokens if step.drafts is None else step.drafts
            tokens_of = {name: sampled[output.req_id_to_index[name]] for name in scheduled.num_scheduled_tokens}
            prefilling = sum(not tokens for tokens in tokens_of.values())
            emitted = sum(map(len, tokens_of.values()))
        accepted = drafted = 0
        for request_id, draft in drafts.items():
            if tokens := tokens_of[request_id]:
                drafted += len(draft)
                accepted += accepted_tokens(len(tokens), verified=1)
                turn = min(turn_of(self._request(request_id)), TURNS) - 1
                self._verified[turn, len(draft), len(tokens)] += 1
        if (paths := getattr(self._runner, "sam_paths", None)) is not None:
            drafted += paths.num_draft_tokens
        # Drafters without a switch are on where they drafted.
        is_on = bool(drafts) if step.is_on is None else step.is_on
        stages = [1e3 * seconds for seconds in step.stages.values()]
        counts = running, prefilling, drafted, accepted, emitted
        self._rows.append((step.ended, 1e3 * (step.ended - step.began), *counts, is_on, *stages, step.replayed))

    def _request(self, request_id: str) -> Any:
        """vLLM's state of a request."""
        return self._runner.requests[request_id]


def _longer(counts: np.ndarray) -> np.ndarray:
    """int64 [n]: of counts by length, 0 to n, how many are longer than 0 to n - 1."""
    return counts[::-1].cumsum()[::-1][1:]


class SecondRunnersRecorder(StepRecorder):
    """As StepRecorder, with vLLM's second model runner. A step is recorded when its tokens have come to the host, for
    which nobody waits on its behalf; graphs are not told apart."""

    def __init__(self, runner):
        self._requests: dict[str, Any] = {}  # as they were scheduled first
        self._ended: set[str] = set()
        super().__init__(runner)
        self._has_graphs = False

    def _wrap(self) -> None:
        runner = self._runner
        name = "record_steps"
        patches.wrap(runner, "execute_model", name, self._execute_model)
        patches.before(runner, "add_requests", name, self._add_requests)
        patches.wrap(runner, "sample", name, functools.partial(self._timed, "verify"))
        patches.wrap(runner, "sample_tokens", name, self._sample_tokens)
        if session := self._of_drafter("session"):
            patches.wrap(session, "draft", name, functools.partial(self._timed, "draft"))

    def _note_preemptions(self, scheduler_output) -> None:
        """`_add_requests` does."""

    def _add_requests(self, scheduler_output) -> None:
        self._ended |= scheduler_output.finished_req_ids
        for request in scheduler_output.scheduled_new_reqs:
            # What this vLLM says of preemptions leaves out those by force: a request that starts again was preempted.
            self._preemptions += request.req_id in self._requests and request.req_id not in self._ended
            self._requests[request.req_id] = request

    def _record_when_known(self, step: RecordedStep, output) -> None:
        step.drafts = self._of_drafter("verifying")

        def get_and_record(get_output):
            tokens = get_output()
            self._record(step, tokens)
            return tokens

        patches.wrap(output, "get_output", "record_steps", get_and_record)

    def _clear(self) -> None:
        super()._clear()
        for name in self._ended:
            self._requests.pop(name, None)
        self._ended.clear()

    def _request(self, request_id: str) -> Any:
        return self._requests[request_id]
