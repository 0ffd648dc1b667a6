"""Rows as they travel: bytes, of an activation in some form, and after it what belongs to the row
and is not rounded.

    own type     | D numbers            |
    bf16         | D numbers, 2 bytes   | weights, experts: as they are
    fp8          | D numbers, 1 byte, e4m3 | a scale in fp32 for each 128 of them |

R rows, D features. Scales are powers of two, which round nothing, so that a number is off by at
most 2**-4 of itself, or 2**-10 of its scale if that is more (DeepSeek-V3, arXiv:2412.19437, section
3.3). 128 numbers with an infinity or a NaN arrive as NaN.
"""

from collections.abc import Sequence

import torch
from torch.nn import functional

from mpitrain.plan.settings.dispatch import BF16, BLOCK, FP8, num_bytes

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0  # of e4m3


def packed(x_RD: torch.Tensor, form: str, *extra: torch.Tensor) -> torch.Tensor:
    """Return rows of bytes [R, B]. extra: [R, any], contiguous."""
    return torch.cat([*_encoded(x_RD, form), *(part.view(torch.uint8) for part in extra)], 1)


def unpacked(
    rows_RB: torch.Tensor, form: str, width: int, dtype: torch.dtype, *extra: tuple[torch.dtype, int]
) -> tuple[torch.Tensor, ...]:
    """Return the activations [R, width] in `dtype`, and what is beside them.

    For each a type and how many of it a row has.
    """
    sizes = [num_bytes(form, width, dtype.itemsize), *(kind.itemsize * count for kind, count in extra)]
    first, *rest = split(rows_RB, sizes)
    return _decoded(first, form, width, dtype), *(typed(part, kind) for part, (kind, _) in zip(rest, extra))


def split(rows_RB: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, ...]:
    """Cut rows of bytes into columns."""
    return rows_RB.split(list(sizes), 1)


def typed(part_RB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a copy of columns of bytes as numbers.

    A single row is contiguous: uncopied, it would keep the others, or begin anywhere.
    """
    return part_RB.clone(memory_format=torch.contiguous_format).view(dtype)


def _encoded(x_RD: torch.Tensor, form: str) -> list[torch.Tensor]:
    if form != FP8:
        x_RD = x_RD.to(torch.bfloat16) if form == BF16 else x_RD
        return [x_RD.contiguous().view(torch.uint8)]
    blocks = functional.pad(x_RD.float(), (0, -x_RD.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    fraction, exponent = torch.frexp(amax / LARGEST)
    # the least with amax <= 448 * 2**power
    power = (exponent - (fraction == 0.5).int()).clamp(-126, 127)
    scales = torch.where(amax.isfinite(), torch.ldexp(torch.ones_like(amax), power), torch.nan)
    values = (blocks / scales.unsqueeze(-1)).to(E4M3).flatten(1)[:, : x_RD.shape[1]]
    return [part.clone(memory_format=torch.contiguous_format).view(torch.uint8) for part in (values, scales)]


def _decoded(rows: torch.Tensor, form: str, width: int, dtype: torch.dtype) -> torch.Tensor:
    if form != FP8:
        return typed(rows, torch.bfloat16 if form == BF16 else dtype).to(dtype)
    values, scales = split(rows, (width, rows.shape[1] - width))
    scales = typed(scales, torch.float32).repeat_interleave(BLOCK, 1)[:, :width]
    return (values.contiguous().view(E4M3).float() * scales).to(dtype)
