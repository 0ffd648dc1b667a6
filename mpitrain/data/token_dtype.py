"""The type of numbers in which token ids are stored, on every machine."""

import numpy as np


def dtype_for(vocab: int) -> np.dtype:
    """Return the smallest unsigned type that holds every id, little-endian."""
    return np.min_scalar_type(vocab - 1).newbyteorder("<")
