"""Two changes to vLLM's model runner for a drafter that needs no KV cache and often drafts nothing."""

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
