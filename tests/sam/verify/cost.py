"""Counts of what a verifier does on a device: operations, passes over the logits, reads by the host."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations by which the host reads a tensor, or whose output's shape depends on a tensor's content.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "item")


class _Counter(TorchDispatchMode):
    def __init__(self, large: int):
        super().__init__()
        self.large = large
        self.counts = {"aten": 0, "large_outputs": 0, "host_syncs": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self.counts["aten"] += 1
        name = func.name().removeprefix("aten::")
        self.counts["host_syncs"] += name.startswith(HOST_READS) and kwargs.get("output_size") is None
        if not func.is_view:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.counts["large_outputs"] += sum(
                isinstance(x, torch.Tensor) and x.numel() >= self.large and not any(x is a for a in args)
                for x in outputs
            )
        return output


def count_operations(call: Callable[[], object], large: int) -> dict[str, int]:
    """Count a call's aten operations, their outputs (not views) of at least `large` elements, and reads by the host."""
    with _Counter(large) as counter:
        call()
    return counter.counts
