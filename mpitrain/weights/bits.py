"""Numbers of safetensors files as numpy arrays, without torch; of bf16 the bits."""

import numpy as np

from mpitrain.checkpoint.dtypes import BF16, SHIFT, widened

# by their names in a header; what isn't here isn't read
DTYPES = {"F64": np.dtype("<f8"), "F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": BF16}
CODES = {dtype: code for code, dtype in DTYPES.items()}
# by our names
NAMED = {"fp64": "F64", "fp32": "F32", "fp16": "F16", "bf16": "BF16"}
NAME_OF = {code: name for name, code in NAMED.items()}
# as config.json has them
TORCH = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
LOST = (1 << SHIFT) - 1  # bits of fp32 that bf16 lacks
SOME = 4096  # numbers that are looked at first
EXPONENT = 0x7F80  # of bf16; all ones: infinite, or NaN


def widen_into(out: np.ndarray, array: np.ndarray) -> bool:
    """Fill `out`, fp32 or fp64, with numbers of any dtype; return whether all are finite."""
    if array.dtype != BF16 or out.dtype != np.float32:
        with np.errstate(over="ignore"):
            out[...] = widened(array)
        return all_finite(out)
    bits = array.view(np.uint16)
    # one pass over what was read, one over what is written
    np.left_shift(bits, SHIFT, out=out.view(np.uint32), dtype=np.uint32, casting="unsafe")
    return all_finite(array)


def all_finite(array: np.ndarray) -> bool:
    """Return whether no number is infinite, or NaN."""
    if array.dtype != BF16:
        return bool(np.isfinite(array).all())
    bits = array.view(np.uint16)
    return not bits.size or int((bits & EXPONENT).max()) != EXPONENT


def is_exact(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether a cast is known to change no number: there is none, or fp32 holds numbers of bf16."""
    if array.dtype == dtype:
        return True
    if dtype != BF16 or array.dtype != np.float32:
        return False
    bits = array.reshape(-1).view(np.uint32)
    return not any(int(np.bitwise_or.reduce(some)) & LOST for some in (bits[:SOME], bits[SOME:]))


def cast(array: np.ndarray, dtype: np.dtype, exact: bool = False) -> np.ndarray:
    """Return an array in another dtype, rounded to nearest even; fp64 to bf16 through fp32.

    A number that fp16 can't hold becomes infinite. exact: is_exact() says so, which is faster.
    """
    if array.dtype == dtype:
        return array
    if exact and dtype == BF16:
        return (array.view(np.uint32) >> SHIFT).astype(np.uint16).view(BF16)
    wide = widened(array)
    with np.errstate(over="ignore"):
        if dtype != BF16:
            return wide.astype(dtype)
        bits = wide.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits >> SHIFT
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= SHIFT
    return rounded.astype(np.uint16).view(BF16)
