"""Repairs of vLLM 0.23.0's CPU backend that reinforcement learning needs. Installed by sam.vllm.plugin on CPU only."""

from __future__ import annotations

import torch

# With fewer rows the matrix libraries take kernels whose sums round differently (seen below 11 rows with MKL).
INVARIANT_ROWS = 32


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear` whose rows do not depend on how many there are: few are padded with zeros."""
    rows = x.shape[0]
    if x.dim() != 2 or rows >= INVARIANT_ROWS:
        return torch.nn.functional.linear(x, weight, bias)
    padded = x.new_zeros(INVARIANT_ROWS, x.shape[1])
    padded[:rows] = x
    return torch.nn.functional.linear(padded, weight, bias)[:rows]


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


def install_rejection_sampler() -> None:
    """Replace the two functions of vLLM's rejection sampler that do not work on CPU.

    Root cause, first: vllm/utils/cpu_triton_utils.py does not know the kernels' `USE_FP64_GUMBEL` argument (TypeError
    at warm-up). Second, silent: its `expand_kernel` writes into an int64 copy, so per-token temperature, top-k and
    top-p stay uninitialised. Both are in 0.23.0 and 0.24.0. Can go when `expand_batch_to_tokens` on CPU returns the
    float values it was given.
    """
    from vllm.v1.sample import rejection_sampler

    from sam import verify

    rejection_sampler.rejection_sample = verify.rejection_sample
    rejection_sampler.expand_batch_to_tokens = verify.expand_batch_to_tokens
