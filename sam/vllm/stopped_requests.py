"""Requests that stop inside accepted drafts: what vLLM counts of them, and sessions, which go on from that count."""

from sam.config import SpeculationConfig
from sam.vllm import patches

COUNT = "count_stopped_text"


def count_text_alone() -> None:
    """Take tokens behind a stop off vLLM's counts, of which a KV connector hands on so many."""
    from vllm.v1.core.sched.scheduler import Scheduler

    patches.wrap(Scheduler, "_update_request_with_output", COUNT, _update_request_with_output)


def _update_request_with_output(original, scheduler, request, new_token_ids, *arguments, **keywords):
    generated = len(new_token_ids)
    kept, stopped = original(scheduler, request, new_token_ids, *arguments, **keywords)
    behind = generated - len(kept)
    if behind and SpeculationConfig.from_vllm(scheduler.vllm_config) is not None:
        # Either is 0 where it counts none of them: of a request preempted since then, and synchronously.
        request.num_computed_tokens = max(0, request.num_computed_tokens - behind)
        request.num_output_placeholders = max(0, request.num_output_placeholders - behind)
    return kept, stopped


def refuse_sessions() -> None:
    """Refuse streaming input, a request that goes on by further input, where drafts are verified."""
    from vllm.v1.engine.input_processor import InputProcessor

    patches.wrap(InputProcessor, "process_inputs", "refuse_sessions", _process_inputs)


def _process_inputs(original, processor, *arguments, resumable: bool = False, **keywords):
    config = SpeculationConfig.from_vllm(processor.vllm_config)
    if resumable and config is not None and config.method != "off":
        raise ValueError(
            f"streaming input goes on from accepted drafts that were cut off at a stop, with speculation.method="
            f"{config.method}: expected off: set it, or send each turn as a request of its own"
        )
    if resumable:
        keywords["resumable"] = resumable
    return original(processor, *arguments, **keywords)
