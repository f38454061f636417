"""What drafts that need no KV cache ask and change of vLLM's model runner, and what requests say to drafters."""

from dataclasses import replace

from sam.vllm import patches

# Keys of SamplingParams.extra_args, for drafters and their history alone: no token depends on them.
PART = "sam_part"  # of a part of a response: tokens of the response's own prompt, and that it may have at most
WAITING = "sam_waiting"  # how many requests wait behind this one for a slot; none where it says nothing


def draft_near_max_model_len(runner) -> None:
    """Let requests be drafted for while another one is near the longest length."""
    if hasattr(runner, "effective_drafter_max_model_len"):
        most = runner.max_model_len + runner.num_spec_tokens
        patches.put(runner, "effective_drafter_max_model_len", "draft_near_max_model_len", most)


def capture_drafts_of_any_length(runner) -> None:
    """Capture each step as a whole graph, however many drafts each request has. Call it before graphs are captured.

    Where attention does not take any lengths in a graph, whole graphs are those of one token a request. Any other mode
    than vLLM's default stays, and so do engines with a draft model, whose own graphs follow the mode.
    """
    from vllm.config import CUDAGraphMode

    compilation, name = runner.compilation_config, "capture_drafts_of_any_length"
    if not runner.num_spec_tokens or compilation.cudagraph_mode != CUDAGraphMode.FULL_AND_PIECEWISE:
        return
    if hasattr(runner.drafter, "initialize_cudagraph_keys"):
        return
    for owner in (runner, runner.cudagraph_dispatcher):
        patches.put(owner, "uniform_decode_query_len", name, 1)

    def resolve_as_full(resolve, *arguments, **keywords):
        compilation.cudagraph_mode = CUDAGraphMode.FULL
        try:
            return resolve(*arguments, **keywords)
        except ValueError:  # of a backend that captures nothing whole
            compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
            return resolve(*arguments, **keywords)

    patches.wrap(runner, "_check_and_update_cudagraph_mode", name, resolve_as_full)


def skip_empty_drafts(runner) -> None:
    """Send the scheduler no drafts after a step without any, instead of an empty draft for every request."""

    def take_if_any(take):
        return take() if runner.drafter.drafted else None

    patches.wrap(runner, "take_draft_token_ids", "skip_empty_drafts", take_if_any)


def skip_accepted_counts(runner) -> None:
    """Copy no counts of accepted tokens to the device."""
    patches.put(runner, "num_accepted_tokens_event", "skip_accepted_counts", None)


def requests_of_rows(runner) -> list[str]:
    """The request that each row of the batch belongs to: further paths have rows of their own."""
    ids, paths = runner.input_batch.req_ids, getattr(runner, "sam_paths", None)
    return ids if paths is None else [paths.owner_of(name) for name in ids]


def add_path_rows(runner) -> None:
    """Let further paths take part in the steps of a model runner that is scheduled synchronously."""
    give_own_counts(runner)
    before(runner, "_update_states", "add_path_rows", runner.sam_paths.before_step)


def give_own_counts(runner) -> None:
    """Give the model runner dictionaries of its own of what is scheduled, which `before_step` trims."""

    def with_own_counts(execute_model, scheduler_output, *arguments, **keywords):
        own = ("num_scheduled_tokens", "scheduled_spec_decode_tokens")
        copies = {name: dict(getattr(scheduler_output, name)) for name in own}
        return execute_model(replace(scheduler_output, **copies), *arguments, **keywords)

    patches.wrap(runner, "execute_model", "own_counts", with_own_counts)


def before(runner, attribute: str, name: str, action) -> None:
    """Call `action` with a method's first argument beforehand."""

    def acting(original, first, *arguments, **keywords):
        action(first)
        return original(first, *arguments, **keywords)

    patches.wrap(runner, attribute, name, acting)


def note_waiting(runner) -> None:
    """Tell the drafter, whenever requests come, how many wait behind the last of them."""

    def note(scheduler_output):
        if new := scheduler_output.scheduled_new_reqs:
            runner.drafter.awaited.update(int(_said(new[-1]).get(WAITING, 0)))

    before(runner, "_update_states", "note_waiting", note)


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
