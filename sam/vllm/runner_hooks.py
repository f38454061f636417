"""What drafts that need no KV cache, and responses in chunks, ask and change of vLLM's model runner."""

import functools
from dataclasses import replace

GENERATED = "sam_generated_tokens"  # the key of SamplingParams.extra_args by which a chunk says what it goes on from
GOES_ON = "sam_goes_on"  # and that its response goes on after it, unless it ends before
PATH_OF = "sam_path_of"  # by which a row of a further path names the request that it belongs to: sam.vllm.paths
WAITING = "sam_waiting"  # and by which a request says how many wait behind it for a slot; none where it says nothing


def is_registered() -> bool:
    """Whether this process has the plugin: its workers ask it before they make a model runner."""
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    return getattr(WorkerWrapperBase.init_device, "_sam", False)


def draft_near_max_model_len(runner) -> None:
    """Let requests be drafted for while another one is near the longest length.

    Root cause: `GPUModelRunner._input_fits_in_drafter` (vLLM 0.23) asks whether the longest request leaves room for a
    whole draft, since a draft model would run out of positions; if not, no request is drafted for, and zeros are
    verified for each. SamProposer gives every request as many tokens as fit. Can go when vLLM asks that of draft models
    only.
    """
    if hasattr(runner, "effective_drafter_max_model_len"):
        runner.effective_drafter_max_model_len = runner.max_model_len + runner.num_spec_tokens


def skip_empty_drafts(runner) -> None:
    """Send the scheduler no drafts after a step without any, instead of an empty draft for every request.

    Root cause: vLLM 0.23 hands the scheduler a list for every request after every step, though `Scheduler.schedule` has
    emptied a request's drafts when it scheduled them. Symptom: a call through the executor and a loop over all requests
    in steps without drafts. Can go when vLLM sends nothing where nothing was drafted.
    """
    take = runner.take_draft_token_ids
    if getattr(take, "_sam", False):
        return

    @functools.wraps(take)
    def take_draft_token_ids():
        return take() if runner.drafter.drafted else None

    take_draft_token_ids._sam = True
    runner.take_draft_token_ids = take_draft_token_ids


def skip_accepted_counts(runner) -> None:
    """Copy no counts of accepted tokens to the device, which models with recurrent state alone read.

    Root cause: GPUModelRunner and NPUModelRunner (vLLM 0.23) wait for an event and copy `num_accepted_tokens` to the
    device in every step as soon as there are speculative tokens. Symptom: one copy a step more than without
    speculation. Can go when vLLM makes that event for hybrid models only.
    """
    runner.num_accepted_tokens_event = None


def continue_requests() -> None:
    """Let model runners go on from tokens that another request generated: the chunks of one response.

    A chunk's prompt, as the scheduler gets it, is the response's prompt and its tokens so far, and
    `SamplingParams.extra_args[GENERATED]` is the number of the latter. The worker splits them again, and then holds the
    request exactly as one that was preempted after those tokens: positions of uniforms, penalties and the drafter's
    group count from the response's first token.

    Root cause: vLLM 0.23 has no way to begin a request with output tokens; streaming input clears the output, and a
    preempted request goes on in its own engine only. Symptom: a chunk's output positions begin at 0, so its tokens
    differ from the undivided response's. Can go when vLLM takes output tokens with a request. May be called again.
    """
    from vllm.v1.worker import gpu_model_runner as module

    runner_class = module.GPUModelRunner
    if getattr(module.CachedRequestState, "_sam", False):
        return

    class ContinuedRequestState(module.CachedRequestState):
        """A request whose prompt is split into prompt and output before anything counts either."""

        _sam = True
        has_chunks = False  # whether this process has had one: without, no step looks for them

        def __post_init__(self):
            self.sam_given = generated = generated_tokens(self.sampling_params)
            if generated:
                ContinuedRequestState.has_chunks = True
                tokens = self.prompt_token_ids
                self.prompt_token_ids, self.output_token_ids = tokens[:-generated], list(tokens[-generated:])
            super().__post_init__()

    module.CachedRequestState = ContinuedRequestState
    update_states = runner_class._update_states

    @functools.wraps(update_states)
    def _update_states(self, scheduler_output):
        if ContinuedRequestState.has_chunks:
            count_given(scheduler_output.scheduled_cached_reqs, self.requests)
        if new := [one for one in scheduler_output.scheduled_new_reqs if not is_path(one.sampling_params)]:
            note_waiting(self, new[-1].sampling_params)
        return update_states(self, scheduler_output)

    runner_class._update_states = _update_states


def continues_requests() -> bool:
    """Whether `continue_requests` has taken hold in this process."""
    from vllm.v1.worker import gpu_model_runner

    return getattr(gpu_model_runner.CachedRequestState, "_sam", False)


def generated_tokens(sampling_params) -> int:
    """Tokens of the response that a request's prompt ends with."""
    extra = getattr(sampling_params, "extra_args", None)
    return int(extra.get(GENERATED, 0)) if extra else 0


def is_path(sampling_params) -> bool:
    """Whether a request is a row of a further path, which the scheduler does not know."""
    return PATH_OF in (getattr(sampling_params, "extra_args", None) or {})


def requests_of_rows(runner) -> list[str]:
    """The request that each row of the batch belongs to: further paths have rows of their own."""
    ids, paths = runner.input_batch.req_ids, getattr(runner, "sam_paths", None)
    return ids if paths is None else [paths.owner_of(name) for name in ids]


def add_path_rows(runner) -> None:
    """Let further paths take part in the steps of a model runner that is scheduled synchronously.

    Root cause: vLLM 0.23 verifies one path of a request. The rows are added to what the model runner is given, in a
    copy of its own: in an engine of one process it is the scheduler's. Can go when vLLM verifies several paths.
    """
    runner.execute_model = with_own_counts(runner.execute_model)
    runner._update_states = before(runner._update_states, runner.sam_paths.before_step)


def with_own_counts(execute_model):
    """Give the model runner dictionaries of its own of what is scheduled, which `before_step` trims.

    Root cause: GPUModelRunner.execute_model (vLLM 0.23) does so for ngram_gpu only. Symptom: in an engine of one
    process the scheduler's own output is trimmed, and its counts of drafts are wrong. Doing so twice changes nothing.
    Can go when vLLM does so for every drafter.
    """

    @functools.wraps(execute_model)
    def wrapped(scheduler_output, *arguments, **keywords):
        own = ("num_scheduled_tokens", "scheduled_spec_decode_tokens")
        copies = {name: dict(getattr(scheduler_output, name)) for name in own}
        return execute_model(replace(scheduler_output, **copies), *arguments, **keywords)

    return wrapped


def before(function, action):
    """`function`, with `action` called with its first argument beforehand."""

    @functools.wraps(function)
    def wrapped(scheduler_output, *arguments, **keywords):
        action(scheduler_output)
        return function(scheduler_output, *arguments, **keywords)

    return wrapped


def note_waiting(runner, sampling_params) -> None:
    """Tell the drafter, if it asks, how many requests wait behind the last one that has come."""
    if (awaited := getattr(getattr(runner, "drafter", None), "awaited", None)) is not None:
        awaited.tell(int((getattr(sampling_params, "extra_args", None) or {}).get(WAITING, 0)))


def goes_on(state) -> bool:
    """Whether a request that is gone was a chunk whose response goes on, by vLLM's state of it: it has all its tokens,
    and none that ends a response."""
    parameters = getattr(state, "sampling_params", None)
    if not (extra := getattr(parameters, "extra_args", None)) or not extra.get(GOES_ON):
        return False
    given, most = generated_tokens(parameters), parameters.max_tokens
    tokens = state.output_token_ids[given : given + most]  # drafts behind the end may have been verified too
    return len(tokens) == most and min(tokens) >= 0 and parameters.all_stop_token_ids.isdisjoint(tokens)


def count_given(cached, requests: dict) -> None:
    """The scheduler counts the output tokens of this chunk; add the tokens before it, or the worker cuts them off."""
    for i, name in enumerate(cached.req_ids):
        if given := requests[name].sam_given:
            cached.num_output_tokens[i] += given


def fill_last_placeholder(runner) -> None:
    """Put the tokens that the step before sampled into the requests' outputs, as penalties need it, and keep the rest.

    Root cause: InputBatch.update_async_output_token_ids (vLLM 0.23) does so under asynchronous scheduling only while a
    request with penalties is in the batch. It takes all placeholders at an output's end for the last step's, and cuts
    off those beyond its tokens. Symptom: when a request with penalties joins, all others forget how many tokens they
    have, and exact verification draws their next ones as if at an earlier position. With vLLM's own drafters
    (`use_async_spec_decode`) the others are optimistic counts, which have to go. Can go when vLLM fills the last ones.
    """
    batch = runner.input_batch
    outputs = batch.sampling_metadata.output_token_ids
    lengths = [len(output) for output in outputs]
    batch.update_async_output_token_ids()
    if getattr(runner, "use_async_spec_decode", False):
        return
    for output, length in zip(outputs, lengths, strict=True):
        if missing := length - len(output):
            output[-1:-1] = [-1] * missing
