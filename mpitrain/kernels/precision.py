"""Mixed precision: which number types a run computes, sums and sends with.

    precision.compute  activations, weights  master weights, gradients, moments, norms' statistics,
                                             softmax, loss
    fp64               fp64                  fp64
    fp32               fp32                  fp32
    bf16, fp16         that                  fp32
    fp8                bf16                  fp32

fp8 is bf16 but for the linears of a block, whose factors are rounded to fp8 first
(fp8.py).
"""

import torch

from mpitrain.config import Precision
from mpitrain.kernels.processor import multiplied_as

TYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.bfloat16,
}


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums of `dtype` are taken."""
    return torch.promote_types(dtype, torch.float32)


def rounds_products(precision: Precision, device: torch.device) -> bool:
    """Return whether a microbatch's product of a weight gradient is rounded to the type of its
    factors before it is added, as torch's autocast does.

    A CPU that is fast in bf16 multiplies it into fp32 by way of fp32 factors, at half the speed or
    less; other CPUs do that anyway, and a GPU sums in fp32.
    """
    if precision.products != "auto":
        return precision.products == "rounded"
    dtype = TYPES[precision.compute]
    return device.type == "cpu" and dtype == torch.bfloat16 == multiplied_as(dtype)


def wire_type(precision: Precision) -> torch.dtype | None:
    """Return the type gradients are rounded to before they are sent, if they are."""
    return None if precision.reduce == "same" else TYPES[precision.reduce]
