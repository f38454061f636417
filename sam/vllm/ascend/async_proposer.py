"""SamProposer under asynchronous scheduling on vllm-ascend 0.23, through the door of its AscendNgramProposerNPU.

What is done in a step is AsyncSamProposer's. vllm-ascend differs in three places: its model runner drafts itself for
this class, with a kernel of its own, so that the proposer is not asked; its model runner's module must not be imported
before its patches are in place; and which scheduler an engine gets is known only when one is made.
"""

import functools

from vllm_ascend.spec_decode.ngram_proposer_npu import AscendNgramProposerNPU

from sam.vllm import patches
from sam.vllm.async_proposer import AsyncSamProposer


class AscendAsyncSamProposer(AsyncSamProposer, AscendNgramProposerNPU):
    """An AsyncSamProposer that vllm-ascend takes for its own."""

    def bind(self, runner) -> None:
        super().bind(runner)
        # vllm-ascend's starts the kernel npu_ngram_spec_decode for this class and copies its counts.
        keep = functools.partial(_keep_on_device, runner)
        patches.put(runner, "propose_draft_token_ids", "draft_on_host", keep)


def _keep_on_device(runner, sampled_token_ids, *_arguments, **_keywords) -> list:
    """The next step's input, if nobody waits for the tokens; drafts come from `after_step`."""
    runner.input_batch.prev_sampled_token_ids = sampled_token_ids[:, :1]
    return []
