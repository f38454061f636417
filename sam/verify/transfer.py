"""What the host knows, on the device, without waiting for what the device was asked before."""

import numpy as np
import torch


def sent(values: torch.Tensor | np.ndarray, device: torch.device) -> torch.Tensor:
    """A tensor of the host's memory, or an array, on `device`.

    From pageable memory PyTorch waits until the copy is over, and with it for the forward pass that was asked for
    before: the host could prepare nothing meanwhile. From pinned memory it goes on.
    """
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
