"""What every engine step did: running requests, drafts, accepted tokens, milliseconds.

Works for any drafter and for none, so that runs can be compared: it reads what vLLM scheduled and what came out, not
who drafted.
"""

import functools
import time
from typing import Self

import numpy as np
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from sam.record.engine_steps import DRAFT_MODEL_TOKENS, POSITION_BIN, EngineSteps, accepted_tokens
from sam.vllm import patches, warmup_cost
from sam.vllm.runner_hooks import response_start


class StepRecorder:
    """Records a model runner's engine steps from the moment it is attached.

    A step's wall time runs from the end of the step before it, so that scheduling and output handling count;
    the first step after an idle time counts from its own start.
    """

    def __init__(self, runner):
        self._runner = runner
        config = runner.vllm_config
        speculative = config.speculative_config
        self._positions = config.model_config.max_model_len // POSITION_BIN + 1
        self._draft_length = speculative.num_speculative_tokens if speculative else 0
        self._has_graphs = warmup_cost.has_graphs(config)
        self._last_end = self._start = 0.0
        self._idle = True
        self._forward = self._verify = self._draft = 0.0
        self._replayed = False
        self._scheduled = self._switch_on = None
        self._taken = dict.fromkeys(DRAFT_MODEL_TOKENS, 0)  # the drafter's totals when steps were last taken
        self._clear()

    @classmethod
    def attach(cls, runner) -> Self:
        """Wrap the runner's stages on this instance; attaching twice gives the same recorder."""
        if (existing := getattr(runner, "_sam_step_recorder", None)) is not None:
            return existing
        recorder = runner._sam_step_recorder = cls(runner)
        around = {
            "execute_model": recorder._execute_model,
            "_sample": functools.partial(recorder._timed, "_verify"),
            "propose_draft_token_ids": functools.partial(recorder._timed, "_draft"),
            "sample_tokens": recorder._sample_tokens,
            **({"_model_forward": recorder._model_forward} if recorder._has_graphs else {}),
        }
        for attribute, wrapper in around.items():
            patches.wrap(runner, attribute, "record_steps", wrapper)
        return recorder

    def take(self) -> EngineSteps:
        """The engine steps since the last call."""
        drafter = getattr(self._runner, "drafter", None)
        by_source = drafter.take_sources().T if hasattr(drafter, "take_sources") else ((), ())
        counters = dict(getattr(drafter, "counters", {}))
        totals = {name: counters.get(name, 0) for name in DRAFT_MODEL_TOKENS}
        steps = EngineSteps(
            *zip(*self._rows, strict=True),
            position_steps=self._position_steps,
            position_emitted=self._position_emitted,
            drafted_at=self._drafted_at,
            accepted_at=self._accepted_at,
            source_drafted=by_source[0],
            source_accepted=by_source[1],
            asynchronous=getattr(self._runner, "use_async_scheduling", False),
            has_graphs=self._has_graphs,
            preemptions=self._preemptions,
            counters=counters,
            **{name: total - self._taken[name] for name, total in totals.items()},
        )
        self._taken = totals
        self._clear()
        return steps

    def _clear(self) -> None:
        self._preemptions = 0
        self._rows: list[tuple] = []  # in the order of EngineSteps' columns
        self._position_steps, self._position_emitted = np.zeros((2, self._positions), dtype=np.int64)
        self._drafted_at, self._accepted_at = np.zeros((2, self._draft_length), dtype=np.int64)

    def _timed(self, attribute: str, function, *args, **kwargs):
        started = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            setattr(self, attribute, getattr(self, attribute) + time.perf_counter() - started)

    def _execute_model(self, function, scheduler_output, *args, **kwargs):
        self._start = time.perf_counter()
        self._scheduled = scheduler_output
        self._preemptions += len(getattr(scheduler_output, "preempted_req_ids", None) or ())
        self._switch_on = getattr(getattr(self._runner, "drafter", None), "switch_on", None)
        result = function(scheduler_output, *args, **kwargs)
        self._forward = time.perf_counter() - self._start
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
            finish = self._ended(self._scheduled, output)
            drafter = getattr(self._runner, "drafter", None)
            if getattr(drafter, "is_awaiting", False):
                drafter.on_read = finish
            else:
                finish()
        self._scheduled = None
        return output

    def _ended(self, scheduled, output):
        """Note when a step ended; what it returns adds the step, once it is known what came out."""
        now = time.perf_counter()
        milliseconds = (now - (self._start if self._idle else self._last_end)) * 1e3
        stages = self._forward * 1e3, self._verify * 1e3, self._draft * 1e3
        measured = milliseconds, self._switch_on, *stages, self._replayed
        self._last_end, self._idle, self._replayed = now, False, False
        self._forward = self._verify = self._draft = 0.0
        return functools.partial(self._record, scheduled, output, now, *measured)

    def _record(self, scheduled, output, now, milliseconds, switch_on, *rest) -> None:
        """Add a step.

        Args:
            now: when it ended, in seconds.
            rest: milliseconds of its stages, and whether it replayed a graph.
        """
        drafter = getattr(self._runner, "drafter", None)
        if getattr(drafter, "on_read", None) is not None:
            drafter.on_read = None
        running = len(scheduled.num_scheduled_tokens)
        drafts, tokens_of = self._verified(scheduled, output)
        accepted = drafted = 0
        if (sampled := getattr(output, "sampled_token_ids", None)) is None:
            # Asynchronous scheduling: every row that has its whole prompt gives one token, but for accepted drafts.
            prefilling = sum(self._is_prefilling(*row) for row in scheduled.num_scheduled_tokens.items())
            emitted = running - prefilling + sum(len(tokens_of[request_id]) - 1 for request_id in drafts)
        else:
            rows = [sampled[output.req_id_to_index[name]] for name in scheduled.num_scheduled_tokens]
            prefilling = sum(not tokens for tokens in rows)
            emitted = sum(map(len, rows))
        for request_id, draft in drafts.items():
            if tokens := tokens_of[request_id]:
                drafted += len(draft)
                accepted += self._record_request(request_id, len(draft), len(tokens))
        if (paths := getattr(self._runner, "sam_paths", None)) is not None:
            drafted += paths.num_draft_tokens
        row = (
            now,
            milliseconds,
            running,
            prefilling,
            drafted,
            accepted,
            emitted,
            # Drafters without a switch are on where they drafted.
            bool(drafts) if switch_on is None else switch_on,
            *rest,
        )
        self._rows.append(row)

    def _verified(self, scheduled, output) -> tuple[dict, dict]:
        """Drafts that the step verified, and the tokens that came out, by request.

        Under asynchronous scheduling the tokens are still on the device: only a drafter on the host knows them, if
        there were drafts.
        """
        if (sampled := getattr(output, "sampled_token_ids", None)) is None:
            drafter = getattr(self._runner, "drafter", None)
            return getattr(drafter, "verifying", {}), getattr(drafter, "accepted", {})
        drafts = scheduled.scheduled_spec_decode_tokens
        return drafts, {request_id: sampled[output.req_id_to_index[request_id]] for request_id in drafts}

    def _is_prefilling(self, request_id: str, tokens: int) -> bool:
        request = self._runner.requests[request_id]
        return request.num_computed_tokens + tokens < request.num_prompt_tokens

    def _record_request(self, request_id: str, drafted: int, emitted: int) -> int:
        accepted = accepted_tokens(emitted, verified=1)
        state = self._runner.requests[request_id]
        position = state.num_tokens - response_start(state) - emitted
        bin_ = max(0, position) // POSITION_BIN
        self._position_steps[bin_] += 1
        self._position_emitted[bin_] += emitted
        self._drafted_at[:drafted] += 1
        self._accepted_at[:accepted] += 1
        return accepted
