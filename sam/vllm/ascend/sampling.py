"""sam.verify behind the signatures of vllm-ascend 0.23, whose patched rejection sampler calls it."""

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


def sample_recovered_tokens(
    max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, sampling_metadata,
    device, use_block_verify=False, target_indices=None, global_vocab_size=None, enable_reduce_sampling=False,
) -> torch.Tensor:  # fmt: skip
    """sam.verify's function with vllm-ascend's further arguments, which belong to settings that are refused."""
    if use_block_verify or enable_reduce_sampling:
        raise ValueError("block verification and reduced sampling are not sam.verify's: switch them off")
    return verify.sample_recovered_tokens(
        max_spec_len, num_draft_tokens, cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs,
        sampling_metadata, device,
    )  # fmt: skip
