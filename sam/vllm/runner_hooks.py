"""What drafts that need no KV cache ask and change of vLLM's model runner, and what requests say to drafters."""

import functools
from dataclasses import replace

# Keys of SamplingParams.extra_args, for drafters and their history alone: no token depends on them.
PART = "sam_part"  # of a part of a response: tokens of the response's own prompt, and that it may have at most
WAITING = "sam_waiting"  # how many requests wait behind this one for a slot; none where it says nothing


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


def capture_drafts_of_any_length(runner) -> None:
    """Capture each step as a whole graph, however many drafts each request has. Call it before graphs are captured.

    Root cause: with k speculative tokens vLLM 0.23 captures whole graphs for steps in which every request has 1 + k
    tokens. All others, those without drafts too, run layer by layer, each attention launched by the host. Symptom: with
    Qwen3-8B on an H200 a step took 8 to 14 ms in place of 5. Where the attention kernels take any lengths in a graph
    (FlashAttention 3), a graph of n tokens serves all steps of n tokens; elsewhere whole graphs are those of one token
    a request. Any other mode than vLLM's default stays, and so do engines with a draft model, whose own graphs follow
    the mode. Can go when vLLM captures decode graphs for several lengths.
    """
    from vllm.config import CUDAGraphMode

    compilation, resolve = runner.compilation_config, runner._check_and_update_cudagraph_mode
    if not runner.num_spec_tokens or compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    if hasattr(runner.drafter, "initialize_cudagraph_keys"):
        return
    runner.uniform_decode_query_len = runner.cudagraph_dispatcher.uniform_decode_query_len = 1

    @functools.wraps(resolve)
    def _check_and_update_cudagraph_mode(*arguments, **keywords):
        compilation.cudagraph_mode = CUDAGraphMode.FULL
        try:
            return resolve(*arguments, **keywords)
        except ValueError:  # of a backend that captures nothing whole
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            return resolve(*arguments, **keywords)

    runner._check_and_update_cudagraph_mode = _check_and_update_cudagraph_mode


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


def note_waiting(runner) -> None:
    """Tell the drafter, whenever requests come, how many wait behind the last of them."""

    def note(scheduler_output):
        if new := scheduler_output.scheduled_new_reqs:
            runner.drafter.awaited.tell(int(_said(new[-1]).get(WAITING, 0)))

    runner._update_states = before(runner._update_states, note)


def _said(request) -> dict:
    """What a request says of itself, which no token depends on: SamplingParams.extra_args."""
    return getattr(getattr(request, "sampling_params", None), "extra_args", None) or {}


def response_start(state) -> int:
    """Tokens of a request's text before its response, by vLLM's state of it: of a part, those of the first part."""
    return min(_said(state).get(PART, (state.num_prompt_tokens,))[0], state.num_prompt_tokens)


def response_of(state) -> list[int]:
    """The tokens of a request's response: those that its prompt ends with, if it is a part, and its own."""
    start = response_start(state)
    given = state.prompt_token_ids[start:] if start < state.num_prompt_tokens else []
    return [*given, *state.output_token_ids]


def is_continued(state) -> bool:
    """Whether the response of a request that is gone goes on in another one, by vLLM's state of it: it has all its
    tokens, none that ends a response, and fewer than the response may have."""
    if not (said := _said(state).get(PART)):
        return False
    parameters, limit = state.sampling_params, said[1]
    most = parameters.max_tokens
    tokens = state.output_token_ids[:most]  # drafts behind the end may have been verified too
    is_cut = len(tokens) == most and min(tokens) >= 0 and parameters.all_stop_token_ids.isdisjoint(tokens)
    return is_cut and state.num_prompt_tokens - response_start(state) + most < limit


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
