"""Repairs of vLLM 0.23.0's CPU backend that training needs: by sam.vllm.plugin, where speculation is configured."""

import functools
import os

import numba
import torch


def install_invariant_attention() -> None:
    """Make attention's sums independent of the batch.

    Root cause: vLLM's CPU attention divides a long context among threads when the batch leaves some idle, and adds
    the parts up; how it divides depends on the other requests. Symptom: log-probabilities differ by some 1e-6 between
    batches, and about one response of 200 tokens in a thousand by a token. vLLM's own switch turns that off; vLLM reads
    it after the model is loaded. Can go when it is off by default.
    """
    os.environ["VLLM_CPU_ATTN_SPLIT_KV"] = "0"


def install_rejection_sampler() -> None:
    """Replace the two functions of vLLM's rejection sampler that do not work on CPU.

    Root cause, first: vllm/utils/cpu_triton_utils.py does not know the kernels' `USE_FP64_GUMBEL` argument (TypeError
    at warm-up). Second, silent: its `expand_kernel` writes into an int64 copy, so per-token temperature, top-k and
    top-p stay uninitialised. Both are in 0.23.0 and 0.24.0. Can go when `expand_batch_to_tokens` on CPU returns the
    float values it was given.
    """
    from vllm.v1.sample import rejection_sampler as vllms

    from sam.vllm import rejection_sampler

    rejection_sampler.install(vllms)


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
    """Let seeded requests' prompts come in pieces.

    Root cause: `GPUModelRunner._bookkeeping_sync` winds the generator of a request whose prompt is not complete back by
    `set_offset`, which CPU generators do not have. Symptom: NotImplementedError ends the engine. Here such a generator
    stays where it is: the noise is fresh either way. Can go when vLLM checks the generator's device there.
    """
    original = runner._bookkeeping_sync

    @functools.wraps(original)
    def bookkeeping_sync(*args, **kwargs):
        if not (generators := runner.input_batch.generators):
            return original(*args, **kwargs)
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        kept = {int(row): generators.pop(int(row)) for row in unfinished if int(row) in generators}
        try:
            return original(*args, **kwargs)
        finally:
            generators.update(kept)

    runner._bookkeeping_sync = bookkeeping_sync
