"""What makes a host wait for its device."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations by which the host reads a tensor, or whose output's shape depends on a tensor's content.
HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "repeat_interleave.Tensor", "item",
              "is_nonzero", "equal")  # fmt: skip


class Operations(TorchDispatchMode):
    """Notes what makes a host wait for its device: a value that is read, a size that depends on values, a copy from
    memory that is not pinned."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords, name = keywords or {}, function.name().removeprefix("aten::")
        output = function(*arguments, **keywords)
        first = next((one for one in arguments if isinstance(one, torch.Tensor)), None)
        moves = name.startswith("_to_copy") and keywords.get("device") not in (None, first.device)
        indices = arguments[1] if name.startswith(("index.", "index_put", "_index_put")) else ()
        is_masked = any(getattr(one, "dtype", None) == torch.bool for one in indices if one is not None)
        reads = name.startswith(HOST_READS) and keywords.get("output_size") is None
        if reads or is_masked or (moves and not keywords.get("non_blocking")):
            self.waits.append(name)
        return output
