"""The dtypes a checkpoint can hold, and how HDF5 stores them: little-endian, understood without mpitrain."""

from functools import cache

import numpy as np
from h5py import h5t

from mpitrain.errors import CheckpointError

# numpy has no bfloat16. An array of its bits says what it is by this dtype: `bits.view(BF16)`, and
# back `array.view(np.uint16)`.
BF16 = np.dtype([("bfloat16", "<u2")])
SHIFT = 16  # bits that fp32 has more than bf16

NAMES = {BF16: "bf16"} | {np.dtype(f"<f{n}"): f"fp{8 * n}" for n in (2, 4, 8)}
NAMES |= {
    np.dtype(f"<{kind}{n}"): f"{name}{8 * n}"
    for kind, name in (("i", "int"), ("u", "uint"))
    for n in (1, 2, 4, 8)
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# read into one another: a copy of a run may have another precision.compute or optimizer.moments
INTERCHANGEABLE = frozenset({DTYPES["bf16"], DTYPES["fp32"], DTYPES["fp64"]})


def widened(array: np.ndarray) -> np.ndarray:
    """Return numbers that numpy computes with: those of bf16 as fp32, others as they are."""
    if array.dtype != BF16:
        return array
    return np.left_shift(array.view(np.uint16), SHIFT, dtype=np.uint32, casting="unsafe").view(np.float32)


def check_dtype(name: str, dtype: np.dtype) -> None:
    """Raise CheckpointError unless arrays of this dtype can be stored.

    `name` is the array's, for the message.
    """
    if dtype not in NAMES:
        raise CheckpointError(
            f"{name} has dtype {dtype.str}, which a checkpoint cannot hold; use one of "
            f"{', '.join(NAMES.values())}"
        )


def is_readable_as(stored: np.dtype, needed: np.dtype) -> bool:
    """Return whether an array may be read for one of another dtype. The reader converts it."""
    return stored == needed or {stored, needed} <= INTERCHANGEABLE


@cache
def to_hdf5(dtype: np.dtype) -> h5t.TypeID:
    """Return the HDF5 type of a dtype.

    That of bf16 is a float with its own field widths, which HDF5 tools read as numbers.
    """
    if dtype != BF16:
        return h5t.py_create(dtype)
    kind = h5t.IEEE_F16LE.copy()
    # position of the sign; position, size of the exponent; position, size of the mantissa
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_ebias(127)
    return kind


@cache
def code_of(dtype: np.dtype) -> bytes:
    """Return how a file says this dtype, without the version of that.

    Plain types are the same in all of them.
    """
    code = to_hdf5(dtype).encode()[2:]  # H5Tencode begins with two bytes of its own
    return bytes([code[0] & 15]) + code[1:]


BY_CODE = {code_of(dtype): dtype for dtype in NAMES}
