"""In which type a CPU multiplies matrices of 16-bit numbers: in their own, or in fp32 where that is faster.

torch multiplies 16-bit matrices on every CPU, and what a processor has no instructions for costs many times an fp32 product. bf16 is fast
by AMX, by AVX512_BF16 and on Arm; but Intel's cores since Sapphire Rapids leave bf16 to AMX, and where a virtual machine hides that, their
AVX512_BF16 has half the speed of fp32 (benchmarks/products.py). Asked of the processor, not of a clock: the same machine, the same bits.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch


def fast_types(has: Mapping[str, Any]) -> frozenset[torch.dtype]:
    """Return the 16-bit types that a processor multiplies as they are. has: what `torch.cpu.get_capabilities` says of it."""
    left_to_amx = has.get("avx512_fp16") and "Intel" in has.get("cpu_name", "")
    bf16 = has.get("amx_bf16") or (has.get("avx512_bf16") and not left_to_amx) or has.get("bf16")
    fp16 = has.get("amx_fp16") or has.get("avx512_fp16") or has.get("fp16_arith")
    return frozenset(dtype for dtype, fast in ((torch.bfloat16, bf16), (torch.float16, fp16)) if fast)


@lru_cache(maxsize=1)
def _fast_here() -> frozenset[torch.dtype]:
    return fast_types(torch.cpu.get_capabilities())


def multiplied_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which this CPU multiplies matrices of `dtype`."""
    return torch.float32 if dtype.itemsize == 2 and dtype not in _fast_here() else dtype


def in_words() -> str:
    """Return in which type this CPU multiplies which 16-bit numbers."""
    types = {"bf16": torch.bfloat16, "fp16": torch.float16}
    said = {True: "as it is", False: "in fp32, which is faster here"}
    return ", ".join(f"{name} {said[multiplied_as(dtype) == dtype]}" for name, dtype in types.items())
