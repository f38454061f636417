"""What vllm-ascend 0.23 needs beside vLLM's own wires.

First sam.verify behind the signatures of vllm-ascend's patched rejection sampler, which imports the three functions.
"""

import functools

import torch

from sam import verify
from sam.vllm import patches


def rejection_sample(*arguments, ori_target_logits=None, **keywords) -> torch.Tensor:
    """As vllm-ascend calls it: logits with the indices of a reduced vocabulary, and, for entropy verification, those
    before temperature. Both are refused (sam.vllm.plugin.check_lossless)."""
    *drafts, logits, bonus_token_ids, sampling_metadata = arguments
    logits = logits[0] if isinstance(logits, tuple) else logits
    return verify.rejection_sample(*drafts, logits, bonus_token_ids, sampling_metadata, **keywords)


def expand_pytorch(output, x, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """Where vllm-ascend's `expand_batch_to_tokens` leaves the work: into `output`, in place."""
    output.copy_(verify.expand_batch_to_tokens(x, cu_num_tokens, len(output), replace_from, replace_to))


def expand_triton(_batch_size, output, x, cu_num_tokens, replace_from, replace_to, max_num_tokens=None) -> None:
    """The same where vllm-ascend would start its Triton kernel."""
    expand_pytorch(output, x, cu_num_tokens, replace_from, replace_to)


def capture_drafts_of_any_length(runner) -> None:
    """Let a whole graph serve any rows that add up to its size. Call it before graphs are captured."""

    def with_sizes_of_one_token(check_and_update, *arguments, **keywords):
        length = runner.uniform_decode_query_len
        mode = runner.compilation_config.cudagraph_mode
        if not mode.separate_routine():
            patches.put(runner, "uniform_decode_query_len", "capture_drafts_of_any_length", 1)
        try:
            return check_and_update(*arguments, **keywords)
        finally:
            patches.put(runner, "uniform_decode_query_len", "capture_drafts_of_any_length", length)

    if runner.num_spec_tokens:
        name = "_check_and_update_cudagraph_mode"
        patches.wrap(runner, name, "capture_drafts_of_any_length", with_sizes_of_one_token)


def async_proposer(door: type) -> type:
    """AsyncSamProposer for vllm-ascend's AscendNgramProposerNPU, for which its model runner would draft itself, with a
    kernel of its own."""
    from sam.vllm.async_proposer import AsyncSamProposer

    def keep_on_device(runner, sampled_token_ids, *_arguments, **_keywords) -> list:
        """The next step's input, if nobody waits for the tokens; drafts come from `after_step`."""
        runner.input_batch.prev_sampled_token_ids = sampled_token_ids[:, :1]
        return []

    class AscendAsyncSamProposer(AsyncSamProposer, door):
        def bind(self, runner) -> None:
            super().bind(runner)
            patches.put(runner, "propose_draft_token_ids", "draft_on_host", functools.partial(keep_on_device, runner))

    return AscendAsyncSamProposer
