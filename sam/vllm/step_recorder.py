"""What every engine step did: running requests, drafts, accepted tokens, milliseconds.

Works for any drafter and for none, so that runs can be compared: it reads what vLLM scheduled and what came out, not
who drafted.
"""

import functools
import time
from typing import Any, Self

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from sam.record.engine_steps import TURNS, EngineSteps, accepted_tokens
from sam.vllm import patches, warmup_cost
from sam.vllm.hints import turn_of


class StepRecorder:
    """Records a model runner's engine steps from the moment it is attached.

    A step's wall time runs from the end of the step before it, so that scheduling and output handling count;
    the first step after an idle time counts from its own start.
    """

    def __init__(self, runner):
        self._runner = runner
        config = runner.vllm_config
        speculative = config.speculative_config
        self._draft_length = speculative.num_speculative_tokens if speculative else 0
        self._has_graphs = warmup_cost.has_graphs(config)
        self._scheduled = self._is_on = None
        self._last_end = self._start = 0.0
        self._idle, self._replayed = True, False
        self._stages = {"forward": 0.0, "verify": 0.0, "draft": 0.0}  # seconds, of the step under way
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
        around = {
            "execute_model": self._execute_model,
            "_sample": functools.partial(self._timed, "verify"),
            "propose_draft_token_ids": functools.partial(self._timed, "draft"),
            "sample_tokens": self._sample_tokens,
            **({"_model_forward": self._model_forward} if self._has_graphs else {}),
        }
        for attribute, wrapper in around.items():
            patches.wrap(self._runner, attribute, "record_steps", wrapper)

    def _of_drafter(self, attribute: str, default: Any = None) -> Any:
        """Of this project's drafter; the default with another one or none."""
        return getattr(getattr(self._runner, "drafter", None), attribute, default)

    def take(self) -> EngineSteps:
        """The engine steps since the last call."""
        if read_awaited := self._of_drafter("read_awaited"):
            read_awaited(is_timed=False)
        steps = EngineSteps(
            *zip(*self._rows, strict=True),
            drafted_at=self._drafted_at,
            accepted_at=self._accepted_at,
            turn_steps=np.array(self._turns)[:, 0],
            turn_emitted=np.array(self._turns)[:, 1],
            asynchronous=self._is_asynchronous(),
            has_graphs=self._has_graphs,
            preemptions=self._preemptions,
            counters=dict(self._of_drafter("counters", {})),
        )
        self._clear()
        return steps

    def _clear(self) -> None:
        self._preemptions = 0
        self._rows: list[tuple] = []  # in the order of EngineSteps' columns
        # Verifications, and tokens that these emitted.
        self._turns = [[0, 0] for _ in range(TURNS)]
        self._drafted_at, self._accepted_at = np.zeros((2, self._draft_length), dtype=np.int64)

    def _timed(self, stage: str, function, *args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            self._stages[stage] += time.perf_counter() - started

    def _execute_model(self, function, scheduler_output, *args, **kwargs):
        self._start = time.perf_counter()
        self._scheduled = scheduler_output
        self._preemptions += len(getattr(scheduler_output, "preempted_req_ids", None) or ())
        self._is_on = getattr(self._of_drafter("last"), "is_on", None)
        result = self._timed("forward", function, scheduler_output, *args, **kwargs)
        # No request goes on from the step before: the time between the two steps was idle.
        if scheduler_output.total_num_scheduled_tokens == 0 or not scheduler_output.scheduled_cached_reqs.req_ids:
            self._idle = True
        return result

    def _model_forward(self, function, *args, **kwargs):
        """Note the mode with which vLLM's forward context tells a captured model whether to replay: vLLM's and
        vllm-ascend's dispatchers name a mode only if a graph of the step's size has been captured."""
        self._replayed = get_forward_context().cudagraph_runtime_mode != CUDAGraphMode.NONE
        return function(*args, **kwargs)

    def _sample_tokens(self, function, *args, **kwargs):
        output = function(*args, **kwargs)
        is_whole = hasattr(output, "sampled_token_ids") or hasattr(output, "get_output")
        if self._scheduled is not None and is_whole:
            record = functools.partial(self._record, self._scheduled, output, self._timing())
            if self._of_drafter("is_awaiting"):  # what came out is known later
                self._runner.drafter.on_read = record
            else:
                record()
        self._scheduled = None
        return output

    def _timing(self) -> tuple[float, float, bool | None, list[float], bool]:
        """Of the step that ends now: seconds, milliseconds, whether drafting was on, its stages' milliseconds, whether
        it replayed a graph."""
        now = time.perf_counter()
        milliseconds = (now - (self._start if self._idle else self._last_end)) * 1e3
        timing = now, milliseconds, self._is_on, [1e3 * seconds for seconds in self._stages.values()], self._replayed
        self._last_end, self._idle, self._replayed = now, False, False
        self._stages = dict.fromkeys(self._stages, 0.0)
        return timing

    def _record(self, scheduled, output, timing) -> None:
        """Add a step."""
        now, milliseconds, is_on, stages, replayed = timing
        if self._of_drafter("on_read") is not None:
            self._runner.drafter.on_read = None
        running = len(scheduled.num_scheduled_tokens)
        if (sampled := getattr(output, "sampled_token_ids", None)) is None:
            # Asynchronous scheduling: tokens are on the device. Every row that has its whole prompt gives one, but for
            # accepted drafts, which a drafter on the host knows.
            drafts, tokens_of = self._of_drafter("verifying", {}), self._of_drafter("accepted", {})
            prefilling = sum(self._is_prefilling(*row) for row in scheduled.num_scheduled_tokens.items())
            emitted = running - prefilling + sum(len(tokens_of[request_id]) - 1 for request_id in drafts)
        else:
            drafts = scheduled.scheduled_spec_decode_tokens
            tokens_of = {name: sampled[output.req_id_to_index[name]] for name in scheduled.num_scheduled_tokens}
            prefilling = sum(not tokens for tokens in tokens_of.values())
            emitted = sum(map(len, tokens_of.values()))
        accepted = drafted = 0
        for request_id, draft in drafts.items():
            if tokens := tokens_of[request_id]:
                drafted += len(draft)
                accepted += self._record_request(request_id, len(draft), len(tokens))
        if (paths := getattr(self._runner, "sam_paths", None)) is not None:
            drafted += paths.num_draft_tokens
        # Drafters without a switch are on where they drafted.
        is_on = bool(drafts) if is_on is None else is_on
        counts = running, prefilling, drafted, accepted, emitted
        self._rows.append((now, milliseconds, *counts, is_on, *stages, replayed))

    def _is_prefilling(self, request_id: str, tokens: int) -> bool:
        request = self._request(request_id)
        return request.num_computed_tokens + tokens < request.num_prompt_tokens

    def _record_request(self, request_id: str, drafted: int, emitted: int) -> int:
        accepted = accepted_tokens(emitted, verified=1)
        of_turn = self._turns[min(turn_of(self._request(request_id)), TURNS) - 1]
        of_turn[0] += 1
        of_turn[1] += emitted
        self._drafted_at[:drafted] += 1
        self._accepted_at[:accepted] += 1
        return accepted

    def _request(self, request_id: str) -> Any:
        """vLLM's state of a request."""
        return self._runner.requests[request_id]

    def _is_asynchronous(self) -> bool:
        return getattr(self._runner, "use_async_scheduling", False)


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
        patches.wrap(runner, "execute_model", "record_second_runners_steps", self._execute_model)
        patches.wrap(runner, "add_requests", "record_second_runners_steps", self._add_requests)
        patches.wrap(runner, "sample", "record_second_runners_steps", functools.partial(self._timed, "verify"))
        patches.wrap(runner, "sample_tokens", "record_second_runners_steps", self._sample_tokens)
        if (speculator := runner.speculator) is not None:
            draft = functools.partial(self._timed, "draft")
            patches.wrap(speculator, "propose", "record_second_runners_steps", draft)

    def _add_requests(self, function, scheduler_output):
        self._ended |= scheduler_output.finished_req_ids
        self._requests |= {request.req_id: request for request in scheduler_output.scheduled_new_reqs}
        return function(scheduler_output)

    def _sample_tokens(self, function, *arguments, **keywords):
        output, scheduled = function(*arguments, **keywords), self._scheduled
        self._scheduled = None
        if output is not None and scheduled is not None:
            record = functools.partial(self._keep_output, scheduled, self._timing())
            patches.wrap(output, "get_output", "record_second_runners_steps", record)
        return output

    def _keep_output(self, scheduled, timing, get_output):
        output = get_output()
        self._record(scheduled, output, timing)
        return output

    def _clear(self) -> None:
        super()._clear()
        for name in self._ended:
            self._requests.pop(name, None)
        self._ended.clear()

    def _request(self, request_id: str) -> Any:
        return self._requests[request_id]

    def _is_asynchronous(self) -> bool:
        return bool(self._runner.scheduler_config.async_scheduling)
