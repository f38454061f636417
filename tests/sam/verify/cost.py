"""Counts of what a verifier does on a device: operations, passes over the logits, waits of the host."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations by which the host reads a tensor, or whose output's shape depends on a tensor's content.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "item",
              "is_nonzero", "equal")  # fmt: skip


class Operations(TorchDispatchMode):
    """Notes aten operations, their outputs (not views) of at least `large` elements, and what makes a host wait for its
    device: a value that is read, a size that depends on values, a copy from memory that is not pinned."""

    def __init__(self, large: int = 1 << 62):
        super().__init__()
        self.large, self.aten, self.large_outputs, self.waits = large, 0, 0, []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords, name = keywords or {}, function.name().removeprefix("aten::")
        output = function(*arguments, **keywords)
        self.aten += 1
        first = next((one for one in arguments if isinstance(one, torch.Tensor)), None)
        moves = name.startswith("_to_copy") and keywords.get("device") not in (None, first.device)
        indices = arguments[1] if name.startswith(("index.", "index_put", "_index_put")) else ()
        is_masked = any(getattr(one, "dtype", None) == torch.bool for one in indices if one is not None)
        reads = name.startswith(HOST_READS) and keywords.get("output_size") is None
        if reads or is_masked or (moves and not keywords.get("non_blocking")):
            self.waits.append(name)
        if not function.is_view:
            outputs = output if isinstance(output, tuple | list) else (output,)
            self.large_outputs += sum(
                isinstance(x, torch.Tensor) and x.numel() >= self.large and not any(x is a for a in arguments)
                for x in outputs
            )
        return output


def count_operations(call: Callable[[], object], large: int) -> dict[str, int]:
    """Count a call's operations, its outputs of at least `large` elements, and waits of the host."""
    with Operations(large) as seen:
        call()
    return {"aten": seen.aten, "large_outputs": seen.large_outputs, "host_syncs": len(seen.waits)}
