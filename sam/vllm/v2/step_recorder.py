"""What every engine step did, with the second model runner."""

import functools
from dataclasses import dataclass
from typing import Any

from sam.vllm import patches
from sam.vllm.step_recorder import StepRecorder


@dataclass
class Progress:
    """Of a request, as sam.vllm.hints reads it.

    Attributes:
        num_tokens: of prompt and response so far.
    """

    sampling_params: Any
    num_prompt_tokens: int
    num_tokens: int


class SecondRunnersRecorder(StepRecorder):
    """As StepRecorder. A step is recorded when its tokens have come to the host, for which nobody waits on its behalf;
    graphs are not told apart."""

    def __init__(self, runner):
        self._requests: dict[str, Progress] = {}
        self._ended: set[str] = set()
        super().__init__(runner)
        self._has_graphs, self._is_asynchronous = False, bool(runner.scheduler_config.async_scheduling)

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
        for request in scheduler_output.scheduled_new_reqs:
            tokens = len(request.prefill_token_ids or ())  # of a preempted one with those of its response
            self._requests[request.req_id] = Progress(request.sampling_params, request.prompt_len, tokens)
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
        for name, tokens in zip(output.req_ids, output.sampled_token_ids, strict=True):
            self._requests[name].num_tokens += len(tokens)
        self._record(scheduled, output, timing)
        return output

    def _clear(self) -> None:
        super()._clear()
        for name in self._ended:
            self._requests.pop(name, None)
        self._ended.clear()

    def _request(self, request_id: str) -> Progress:
        return self._requests[request_id]
