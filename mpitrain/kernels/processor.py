"""What a CPU is slow at: 16-bit products, which are then taken in fp32, and fp32 products by MKL,
which oneDNN takes then.

torch multiplies 16-bit matrices on every CPU, and what a processor has no instructions for costs
many times an fp32 product. bf16 is fast by AMX, by AVX512_BF16 and on Arm; but Intel's cores since
Sapphire Rapids leave bf16 to AMX, and where a virtual machine hides that, their AVX512_BF16 has
half the speed of fp32. MKL is Intel's: on AMD's Zen 5 its fp32 products have 0.45 of oneDNN's
speed, on Zen 4 0.7 to 0.9 (benchmarks/products.py). Asked of the processor, not of a clock: the
same machine, the same bits.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

# what torch.compile calls, too
ONEDNN = torch.ops.mkldnn._linear_pointwise.default if torch.backends.mkldnn.is_available() else None


def onednn_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return x @ weight.T by oneDNN, whatever the shape.

    weight: rows or columns without gaps, or it takes a thousand times as long.
    """
    return ONEDNN(x, weight, None, "none", [], "")


def fast_types(has: Mapping[str, Any]) -> frozenset[torch.dtype]:
    """Return the 16-bit types that a processor multiplies as they are.

    has: what `torch.cpu.get_capabilities` says of it.
    """
    left_to_amx = has.get("avx512_fp16") and "Intel" in has.get("cpu_name", "")
    bf16 = has.get("amx_bf16") or (has.get("avx512_bf16") and not left_to_amx) or has.get("bf16")
    fp16 = has.get("amx_fp16") or has.get("avx512_fp16") or has.get("fp16_arith")
    return frozenset(dtype for dtype, fast in ((torch.bfloat16, bf16), (torch.float16, fp16)) if fast)


@lru_cache(maxsize=1)
def _fast_here() -> frozenset[torch.dtype]:
    return fast_types(torch.cpu.get_capabilities())


def slow_by_mkl(has: Mapping[str, Any]) -> bool:
    """Return whether MKL leaves much of a processor's speed: an x86 that isn't Intel's.

    Elsewhere torch has no MKL.
    """
    return has.get("architecture") == "x86_64" and "Intel" not in has.get("cpu_name", "Intel")


@lru_cache(maxsize=1)
def mkl_is_slow() -> bool:
    """Return whether oneDNN's fp32 products are to be taken on this CPU, also where they don't add
    in place.
    """
    return ONEDNN is not None and slow_by_mkl(torch.cpu.get_capabilities())


def multiplied_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which this CPU multiplies matrices of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 and dtype not in _fast_here() else dtype


def in_words() -> str:
    """Return in which type this CPU multiplies which 16-bit numbers, and by which library fp32."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    said = {True: "as it is", False: "in fp32, which is faster here"}
    narrow = [f"{name} {said[multiplied_as(dtype) == dtype]}" for name, dtype in types.items()]
    return ", ".join(
        [
            *narrow,
            "fp32 by oneDNN, as MKL is slow here"
            if mkl_is_slow()
            else "fp32 by oneDNN where products are large",
        ]
    )
