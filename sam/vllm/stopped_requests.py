"""Where a request stops, vLLM's scheduler counts what the text holds: a session of streaming input goes on from there,
and a KV connector hands on so much. Tokens of drafts behind the stop are none of it, nor is a step under way."""

from sam.config import SpeculationConfig
from sam.vllm import patches

NAME = "count_stopped_text"


def install() -> None:
    """Change vLLM's scheduler, and so the asynchronous one, which calls it; neither without a `speculation`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    patches.wrap(Scheduler, "_update_request_with_output", NAME, _update_request_with_output)
    if "drop_stale_output" not in Scheduler._handle_stopped_request.__code__.co_names:  # as from vLLM 0.31 on
        patches.wrap(Scheduler, "_handle_stopped_request", NAME, _handle_stopped_request)


def _is_ours(scheduler) -> bool:
    return SpeculationConfig.from_vllm(scheduler.vllm_config) is not None


def _update_request_with_output(original, self, request, new_token_ids, *arguments, **keywords):
    """Take tokens behind a stop off the counts, as vLLM does with rejected drafts."""
    from vllm.v1.request import RequestStatus

    if request.resumable and request.status == RequestStatus.PREEMPTED and _is_ours(self):
        # It would lose its text if it stopped now: these tokens are drawn again.
        request.num_output_placeholders = 0
        return [], False
    generated = len(new_token_ids)
    kept, stopped = original(self, request, new_token_ids, *arguments, **keywords)
    behind = generated - len(kept)
    if behind and _is_ours(self):
        # Either is 0 where it counts none of them: of a request preempted since then, and synchronously.
        request.num_computed_tokens = max(0, request.num_computed_tokens - behind)
        request.num_output_placeholders = max(0, request.num_output_placeholders - behind)
    return kept, stopped


def _handle_stopped_request(original, self, request):
    """Let a session go on from its text, whose last token gives way to its next input."""
    if request.resumable and _is_ours(self):
        _discard_output(request)
        request.spec_token_ids = []
        block_size = self.kv_cache_manager.block_pool.hash_block_size
        del request.block_hashes[request.num_computed_tokens // block_size :]
    return original(self, request)


def _discard_output(request) -> None:
    """Drop the output of the step under way, if there is one, when it comes."""
    if hasattr(request, "drop_stale_output"):  # vLLM 0.27
        request.drop_stale_output = True
        request.num_stale_output_tokens = request.num_in_flight_tokens
    else:
        request.async_tokens_to_discard = int(request.num_output_placeholders > 0)
    request.num_computed_tokens -= request.num_output_placeholders
    request.num_output_placeholders = 0
