"""What drafts that need no KV cache change of vLLM's model runner."""

import functools
import threading
from dataclasses import replace

from sam.vllm import patches
from sam.vllm.hints import RequestHints


def install(runner) -> None:
    """Change what a bound drafter asks for, but for what sam.vllm.async_hooks does under asynchronous scheduling."""
    from vllm.platforms import current_platform

    if hasattr(runner, "effective_drafter_max_model_len"):
        most = runner.max_model_len + runner.num_spec_tokens
        patches.put(runner, "effective_drafter_max_model_len", "draft_near_max_model_len", most)
    patches.put(runner, "num_accepted_tokens_event", "skip_accepted_counts", None)
    patches.before(runner, "_update_states", "note_waiting", functools.partial(_note_waiting, runner))
    notice_new_weights(runner)
    if not getattr(runner, "use_async_scheduling", False):
        take_if_any = lambda take: take() if runner.drafter.last.drafted else None  # noqa: E731
        patches.wrap(runner, "take_draft_token_ids", "skip_empty_drafts", take_if_any)
    if current_platform.is_cuda():
        capture_drafts_of_any_length(runner)


def _note_waiting(runner, scheduler_output) -> None:
    """Tell the drafter, whenever requests come, how many wait behind the last of them."""
    if new := scheduler_output.scheduled_new_reqs:
        runner.drafter.awaited.update(RequestHints.of(new[-1].sampling_params).waiting or 0)


def notice_new_weights(runner) -> None:
    """Tell the drafter of the model's new weights, or of a LoRA adapter that is loaded again: once for all pieces that
    come between two steps."""
    told, adapters, name = threading.Event(), set(), "notice_new_weights"

    def tell() -> None:
        if not told.is_set():
            told.set()
            runner.drafter.weights_updated()

    def load_weights(load, *arguments, **keywords):
        tell()
        return load(*arguments, **keywords)

    def add_lora(add, request):
        if request.lora_int_id in adapters:
            tell()
        adapters.add(request.lora_int_id)
        return add(request)

    patches.before(runner, "_update_states", name, lambda _: told.clear())
    patches.wrap(runner.get_model(), "load_weights", name, load_weights)
    patches.wrap(runner, "add_lora", name, add_lora)


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


def requests_of_rows(runner) -> list[str]:
    """The request that each row of the batch belongs to: further paths have rows of their own."""
    ids, paths = runner.input_batch.req_ids, getattr(runner, "sam_paths", None)
    return ids if paths is None else [paths.owner_of(name) for name in ids]


def add_path_rows(runner) -> None:
    """Let further paths take part in the steps of a model runner that is scheduled synchronously."""
    give_own_counts(runner)
    patches.before(runner, "_update_states", "add_path_rows", runner.sam_paths.before_step)


def give_own_counts(runner) -> None:
    """Give the model runner dictionaries of its own of what is scheduled, which `before_step` trims."""

    def with_own_counts(execute_model, scheduler_output, *arguments, **keywords):
        own = ("num_scheduled_tokens", "scheduled_spec_decode_tokens")
        copies = {name: dict(getattr(scheduler_output, name)) for name in own}
        return execute_model(replace(scheduler_output, **copies), *arguments, **keywords)

    patches.wrap(runner, "execute_model", "own_counts", with_own_counts)


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
