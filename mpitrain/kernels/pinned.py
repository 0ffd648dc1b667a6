"""Memory of the host for what a device sends there and fetches from there."""

import numpy as np
import torch


def on_host(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return uninitialised host memory, pinned if `device` is a GPU.

    Then it copies by itself while host and GPU work.

    torch rounds pinned memory up to a power of two.  A rehearsal's, of shapes only, has none.
    """
    if device.type == "meta":
        return torch.empty(length, dtype=dtype, device=device)
    return torch.empty(length, dtype=dtype, pin_memory=device.type == "cuda")


def on_device(numbers: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return numbers that the host has as a tensor on a device.

    A GPU fetches them from pinned memory, when it comes round to it: from other memory the host
    would wait until it has.
    """
    tensor = torch.from_numpy(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
