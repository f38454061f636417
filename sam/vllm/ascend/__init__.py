"""What vllm-ascend 0.23 needs beside vLLM's own wires.

Here: sam.verify behind the signatures of vllm-ascend's patched rejection sampler, which imports the three functions.
"""

import torch

from sam import verify
from sam.vllm.rejection_sampler import RejectionVerification


class AscendVerification(RejectionVerification):
    """As vllm-ascend calls it: logits with the indices of a reduced vocabulary, and those before temperature."""

    def __call__(self, *arguments, **keywords) -> torch.Tensor:
        *drafts, logits, bonus_token_ids, sampling_metadata = arguments
        keywords.pop("ori_target_logits", None)  # of entropy verification, which is refused
        if isinstance(logits, tuple):
            logits, indices = logits
            if indices is not None:
                raise ValueError(
                    "enable_reduce_sample=True leaves each rank a part of the vocabulary, which sam.verify does not "
                    "sample from: set additional_config.enable_reduce_sample=False"
                )
        return super().__call__(*drafts, logits, bonus_token_ids, sampling_metadata, **keywords)


rejection_sample = AscendVerification()


def expand_pytorch(output, x, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS=None) -> None:
    """Where vllm-ascend's `expand_batch_to_tokens` leaves the work: into `output`, in place."""
    output.copy_(verify.expand_batch_to_tokens(x, cu_num_tokens, len(output), replace_from, replace_to))


def expand_triton(_batch_size, output, x, cu_num_tokens, replace_from, replace_to, max_num_tokens=None) -> None:
    """The same where vllm-ascend would start its Triton kernel."""
    expand_pytorch(output, x, cu_num_tokens, replace_from, replace_to)
