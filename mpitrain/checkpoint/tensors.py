"""torch's tensors as the arrays that a checkpoint holds, and back. numpy has no bf16.

Its bits are marked (dtypes.py).
"""

import numpy as np
import torch

from mpitrain.checkpoint.dtypes import BF16


def to_array(x: torch.Tensor) -> np.ndarray:
    """Return the elements as an array, in the same memory if that is a host's."""
    x = x.cpu()
    return x.view(torch.int16).numpy().view(BF16) if x.dtype == torch.bfloat16 else x.numpy()


def to_tensor(array: np.ndarray) -> torch.Tensor:
    """Return an array that was read as a tensor in the same memory."""
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == BF16
        else torch.from_numpy(array)
    )
