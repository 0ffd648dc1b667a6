"""Which dropouts there are, and what their masks take while they are made (kernels/dropout.py).

Integers only.
"""

# sites of a block, by which masks differ
EMBEDDING = 0
ATTENTION = 1
AFTER_ATTENTION = 2
AFTER_FFN = 3

# elements whose mask is made at once, and the bytes of an element: 2 for each tensor of words
DROPPED = 2**18
DROPPED_ON_A_DEVICE = 2**24
MASK_BYTES = 16


def mask_bytes(elements: int, on_gpu: bool) -> int:
    """Return what masks of so many elements of the residual stream take, some at a time."""
    return MASK_BYTES * min(elements, DROPPED_ON_A_DEVICE if on_gpu else DROPPED)
