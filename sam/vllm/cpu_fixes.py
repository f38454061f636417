"""Repairs of vLLM 0.23.0's CPU backend that reinforcement learning needs. Installed by sam.vllm.plugin on CPU only."""

import functools
import os

import torch

# With fewer rows the matrix libraries take kernels whose sums round differently (seen below 11 rows with MKL).
INVARIANT_ROWS = 32


_linear = torch.nn.functional.linear


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` whose rows do not depend on how many there are: few are padded with zeros."""
    rows = x.shape[0]
    if x.dim() != 2 or rows >= INVARIANT_ROWS:
        return _linear(x, weight, bias)
    padded = x.new_zeros(INVARIANT_ROWS, x.shape[1])
    padded[:rows] = x
    return _linear(padded, weight, bias)[:rows]


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = batch_invariant_linear


def install_reloadable_weights() -> None:
    """Keep linear layers' weights where a weight sync can load them.

    Root cause: `dispatch_cpu_unquantized_gemm(layer, remove_weight=True)` in vllm/model_executor/layers/utils.py
    packs the weight for its CPU kernels and puts an empty parameter in its place. Symptom: the second weight sync of
    a training run fails with "Attempted to load weight ([128, 128]) into parameter ([0])". The replacement also makes
    rows independent of the batch. Can go when vLLM's CPU backend supports reloading weights.
    """
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _keep_weight


def install_invariant_attention() -> None:
    """Make attention's sums independent of the batch.

    Root cause: vLLM's CPU attention divides a long context among threads when the batch leaves some idle, and adds
    the parts up; how it divides depends on the other requests. Symptom: log-probabilities differ by some 1e-6 between
    batches, and about one response of 200 tokens in a thousand by a token. vLLM's own switch turns that off. Can go
    when it is off by default.
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


def install_unread_generators(runner_class) -> None:
    """Let seeded requests' prompts come in pieces.

    Root cause: `GPUModelRunner._bookkeeping_sync` winds the generator of a request whose prompt is not complete back by
    `set_offset`, which CPU generators do not have. Symptom: NotImplementedError ends the engine. Here such a generator
    stays where it is: the noise is fresh either way. Can go when vLLM checks the generator's device there.
    """
    original = runner_class._bookkeeping_sync
    if getattr(original, "_sam", False):
        return

    @functools.wraps(original)
    def bookkeeping_sync(self, *args, **kwargs):
        generators = self.input_batch.generators
        unfinished = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0]
        kept = {int(row): generators.pop(int(row)) for row in unfinished if int(row) in generators}
        try:
            return original(self, *args, **kwargs)
        finally:
            generators.update(kept)

    bookkeeping_sync._sam = True
    runner_class._bookkeeping_sync = bookkeeping_sync
