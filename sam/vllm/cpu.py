"""Repairs of vLLM 0.23.0's CPU backend that reinforcement learning needs. Installed by sam.vllm.plugin, on CPU only."""

from __future__ import annotations

import torch

# Fewer rows take other kernels (matrix-vector) whose sums round differently.
INVARIANT_ROWS = 32


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`linear` whose rows do not depend on how many rows there are: few are padded with zeros."""
    if x.shape[0] >= INVARIANT_ROWS or x.dim() != 2:
        return torch.nn.functional.linear(x, weight, bias)
    padded = x.new_zeros(INVARIANT_ROWS, x.shape[1])
    padded[: x.shape[0]] = x
    return torch.nn.functional.linear(padded, weight, bias)[: x.shape[0]]


def _keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = batch_invariant_linear


def install_reloadable_weights() -> None:
    """vLLM packs a linear layer's weight for its CPU kernels and replaces the parameter by an empty one.

    Root cause: `dispatch_cpu_unquantized_gemm(layer, remove_weight=True)` in model_executor/layers/utils.py.
    Symptom: the second weight sync of a training run fails, "Attempted to load weight ([128, 128]) into
    parameter ([0])". Can go when vLLM's CPU backend supports reloading weights.
    """
    from vllm.model_executor.layers import utils

    utils.dispatch_cpu_unquantized_gemm = _keep_weight
