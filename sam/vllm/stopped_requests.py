"""Where a request stops, vLLM's scheduler counts what the text holds: a session of streaming input goes on from there,
and a KV connector hands on so much. Tokens of drafts behind the stop are none of it, nor is a step under way."""

from sam.config import SpeculationConfig
from sam.vllm import patches

NAME = "count_stopped_text"


def install() -> None:
    """Change vLLM's scheduler, and so the asynchronous one, which calls it; neither without a `speculation`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    patches.wrap(Scheduler, "_update_request_with_output", NAME, _leave_out_tokens_behind)
    patches.wrap(Scheduler, "_preempt_request", NAME, _preempt)
    if not _drops_outputs():
        patches.wrap(Scheduler, "_handle_stopped_request", NAME, _stop)


def _drops_outputs() -> bool:
    """Whether a session that stops drops the output of the step under way, as from vLLM 0.31 on."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return "drop_stale_output" in Scheduler._handle_stopped_request.__code__.co_names


def _is_ours(scheduler) -> bool:
    return SpeculationConfig.from_vllm(scheduler.vllm_config) is not None


def _leave_out_tokens_behind(original, self, request, new_token_ids, *arguments, **keywords):
    """Take tokens behind a stop off the counts, as vLLM does with rejected drafts."""
    generated = len(new_token_ids)
    kept, stopped = original(self, request, new_token_ids, *arguments, **keywords)
    behind = generated - len(kept)
    if behind and _is_ours(self):
        # Either is 0 where it counts none of them: of a request preempted since then, and synchronously.
        request.num_computed_tokens = max(0, request.num_computed_tokens - behind)
        request.num_output_placeholders = max(0, request.num_output_placeholders - behind)
    return kept, stopped


def _discard_output(request) -> None:
    """Draw the tokens of the step under way again, if there is one: drop its output when it comes."""
    if request.num_output_placeholders:
        request.num_computed_tokens = max(0, request.num_computed_tokens - request.num_output_placeholders)
        request.num_output_placeholders = 0
        request.async_tokens_to_discard = 1


def _stop(original, self, request):
    """Let a session go on from its text, whose last token gives way to its next input."""
    if request.resumable and _is_ours(self):
        _discard_output(request)
        request.spec_token_ids = []
        del request.block_hashes[request.num_computed_tokens // self.kv_cache_manager.block_pool.hash_block_size :]
    return original(self, request)


def _preempt(original, self, request, *arguments, **keywords):
    """Where a session that is preempted has an output under way, do not let it stop by that: it would lose its text."""
    original(self, request, *arguments, **keywords)
    if not request.resumable or not _is_ours(self):
        return
    if hasattr(request, "drop_stale_output"):  # vLLM 0.27
        request.drop_stale_output = True
    else:
        _discard_output(request)
