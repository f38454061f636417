"""What a drafter that needs no KV cache, and often drafts nothing, asks and changes of vLLM's model runner."""

import functools


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


def is_drafting_rank(runner) -> bool:
    """Whether the scheduler is given this rank's drafts, which all ranks then verify.

    vLLM's executors take the drafts of the first tensor-parallel rank (MultiprocExecutor.take_draft_token_ids) and send
    them to every rank with the step that verifies them. So one rank drafts, and no rank's step depends on what another
    knows or when. With an external launcher each rank has a scheduler of its own, and drafts for itself.
    """
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, model_parallel_is_initialized

    parallel = runner.vllm_config.parallel_config
    alone = parallel.tensor_parallel_size == 1 or parallel.distributed_executor_backend == "external_launcher"
    return alone or not model_parallel_is_initialized() or get_tensor_model_parallel_rank() == 0
