"""Initial weights that know nothing of the layout.

Element i of a parameter is a pure function of (seed, name, i): a shard initialises itself alone and equals the same elements of the
whole. Counter-based random numbers: Philox (Salmon et al. 2011), of which numpy guarantees the raw bits over versions.
"""

import hashlib

import numpy as np
import torch


def uniforms(seed: int, name: str, begin: int, end: int) -> np.ndarray:
    """Return fp64 numbers in (0, 1), elements [begin, end) of the stream of a parameter."""
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], np.uint64)
    bits = np.random.Philox(key=key, counter=[begin // 4, 0, 0, 0]).random_raw(end - begin // 4 * 4)[begin % 4 :]
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def normal(seed: int, name: str, begin: int, end: int, std: float) -> torch.Tensor:
    """Return elements [begin, end) of a normally distributed parameter in fp64: uniform numbers through the inverse distribution."""
    return torch.special.ndtri(torch.from_numpy(uniforms(seed, name, begin, end))) * std
