"""Repairs of vLLM 0.23.0's CPU backend that training needs: by sam.vllm.plugin, where speculation is configured."""

import os

import numba
import torch

from sam.config import SpeculationConfig
from sam.vllm import patches


def install(runner, config: SpeculationConfig) -> None:
    """Put all but the first of these into a model runner."""
    keep_unread_generators(runner)
    keep_threads(runner)
    if config.batch_invariant != "off":
        # Attention's sums do not depend on the batch. Root cause: vLLM's CPU attention divides a long context among
        # threads when the batch leaves some idle, and adds the parts up. Symptom: log-probabilities differ by some 1e-6
        # between batches, and about one response of 200 tokens in a thousand by a token. vLLM reads its own switch
        # after the model is loaded. Can go when it is off by default.
        os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def install_rejection_sampler() -> None:
    """Replace the functions of vLLM's rejection sampler that do not work on a CPU, whatever verifies."""
    from vllm.v1.sample import rejection_sampler as vllms

    from sam.vllm import rejection_sampler

    rejection_sampler.install(vllms)


def copy_lora_indices() -> None:
    """Let LoRA's layers copy as vLLM's CPU worker does, whatever was imported first."""
    from vllm.lora.punica_wrapper import utils
    from vllm.v1.worker.cpu.shm import async_tensor_h2d

    patches.put(utils, "async_tensor_h2d", "copy_lora_indices", async_tensor_h2d)


def keep_threads(runner) -> None:
    """Let vLLM's prompt lookup leave torch's number of threads as it is.

    Root cause: `NgramProposer.propose` lets numba start its threads, which sets OpenMP's number to all processors.
    Symptom: from then on matrix products are divided otherwise, and on a processor without AVX-512 log-probabilities
    differ by some 1e-6. Here they are started before. Can go when vLLM does that, or numba leaves the number alone.
    """
    if type(getattr(runner, "drafter", None)).__name__ == "NgramProposer":
        threads = torch.get_num_threads()
        numba.get_num_threads()  # starts them
        torch._C.set_num_threads(threads)  # vLLM has emptied the public one


def keep_unread_generators(runner) -> None:
    """Let seeded requests' prompts come in pieces."""

    def bookkeeping_sync(original, *args, **kwargs):
        if not (generators := runner.input_batch.generators):
            return original(*args, **kwargs)
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        kept = {int(row): generators.pop(int(row)) for row in unfinished if int(row) in generators}
        try:
            return original(*args, **kwargs)
        finally:
            generators.update(kept)

    patches.wrap(runner, "_bookkeeping_sync", "keep_unread_generators", bookkeeping_sync)
