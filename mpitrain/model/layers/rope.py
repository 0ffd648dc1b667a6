"""Rotary positions as a layer declares them (arXiv:2104.09864), and their scalings for sequences
longer than was trained: linear (arXiv:2306.15595), YaRN (arXiv:2309.00071), dynamic (the same,
section 3.3: "Dynamic NTK") and Llama 3.1's (arXiv:2407.21783, section 3.2; `rope_type` llama3 in
transformers).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.plan.declared.resolved import ResolvedAttention


class Llama3(NamedTuple):
    """Pairs that turn fewer than `low` times within `length` positions are slowed by `factor`,
    those with more than `high` not.
    """

    factor: float
    length: int
    low: float
    high: float


class Dynamic(NamedTuple):
    """Theta grows with what sequences have beyond `length`, the slowest pair by `factor` for each."""

    factor: float
    length: int


@dataclass(frozen=True)
class Rope:
    """Rotary positions of the first `width` features of a head.

    theta: the slowest pair turns once in about 2 pi theta positions.
    factor, length: YaRN for sequences `factor` times as long as the `length` that was trained with;
    1: none.
    mscale: by how much YaRN sharpens attention.
    rounded: its ramp between fast and slow pairs begins and ends with a whole pair.
    llama3: Llama 3.1's scaling, None for none.
    linear: by which positions are divided (arXiv:2306.15595); 1: none.
    dynamic: the scaling by how long sequences are, None for none.
    fast, slow: turns within `length` of pairs that YaRN leaves as they are, and of those that it
    slows by the whole factor.
    """

    width: int
    theta: float
    factor: float = 1.0
    length: int = 0
    mscale: float = 1.0
    rounded: bool = True
    llama3: "Llama3 | None" = None
    linear: float = 1.0
    fast: float = 32.0
    slow: float = 1.0
    dynamic: "Dynamic | None" = None

    @property
    def magnitude(self) -> float:
        """By which queries and keys are multiplied, so that scores are by its square (YaRN, section 3.3)."""
        return 1.0 if self.factor == 1 else 0.1 * self.mscale * math.log(self.factor) + 1.0


def rope_of(attention: ResolvedAttention, width: int) -> Rope:
    """Return what a configuration says; the ramp of YaRN is rounded, unless a key says no."""
    llama3 = None
    if (attention.llama3_factor or 1) > 1:
        llama3 = Llama3(
            attention.llama3_factor, attention.llama3_length, attention.llama3_low, attention.llama3_high
        )
    dynamic = None
    if attention.dynamic_length:
        dynamic = Dynamic(attention.dynamic_factor or 1.0, attention.dynamic_length)
    return Rope(
        width,
        attention.theta,
        attention.yarn_factor,
        attention.yarn_length,
        attention.yarn_mscale,
        attention.yarn_rounded is not False,
        llama3,
        attention.linear_factor or 1.0,
        attention.yarn_fast or Rope.fast,
        attention.yarn_slow or Rope.slow,
        dynamic,
    )
