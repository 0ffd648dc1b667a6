"""Digests of tensors: equal ones mean equal bits."""

from collections.abc import Iterable

import numpy as np
import torch
import xxhash

from mpitrain.comm.base.buffers import Array, is_tensor


def digest(parts: Iterable[Array]) -> int:
    """Return the 64-bit digest of some arrays or tensors, one after the other. Waits for a device."""
    hasher = xxhash.xxh3_64()
    for x in parts:
        hasher.update(as_bytes(x))
    return hasher.intdigest()


def as_bytes(x: Array) -> np.ndarray:
    """Return the bytes of an array or a tensor, in host memory; of what lies there, without a copy."""
    if is_tensor(x) and not x.numel():
        return np.empty(0, np.uint8)
    if is_tensor(x):
        return x.detach().contiguous().flatten().view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(x).reshape(-1).view(np.uint8)
