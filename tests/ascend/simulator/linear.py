"""Matrix products whose rows do not depend on how many there are, as in vllm-ascend's batch-invariant mode."""

import torch

# With fewer rows the matrix libraries of a CPU take kernels whose sums round differently (seen below 16 rows with MKL).
INVARIANT_ROWS = 32

_linear = torch.nn.functional.linear


def batch_invariant_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`torch.nn.functional.linear`, few rows padded with zeros."""
    rows = x.shape[0]
    if x.dim() != 2 or rows >= INVARIANT_ROWS:
        return _linear(x, weight, bias)
    padded = x.new_zeros(INVARIANT_ROWS, x.shape[1])
    padded[:rows] = x
    return _linear(padded, weight, bias)[:rows]
