"""Rotary positions as a layer declares them (arXiv:2104.09864), and their scalings for sequences
longer than was trained: YaRN (arXiv:2309.00071) and Llama 3.1's (arXiv:2407.21783, section 3.2;
`rope_type` llama3 in transformers).
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from mpitrain.config import AttentionTable


class Llama3(NamedTuple):
    """Pairs that turn fewer than `low` times within `length` positions are slowed by `factor`,
    those with more than `high` not.
    """

    factor: float
    length: int
    low: float
    high: float


@dataclass(frozen=True)
class Rope:
    """Rotary positions of the first `width` features of a head.

    theta: the slowest pair turns once in about 2 pi theta positions.
    factor, length: YaRN for sequences `factor` times as long as the `length` that was trained with;
    1: none.
    mscale: by how much YaRN sharpens attention.
    rounded: its ramp between fast and slow pairs begins and ends with a whole pair.
    llama3: Llama 3.1's scaling, None for none.
    """

    width: int
    theta: float
    factor: float = 1.0
    length: int = 0
    mscale: float = 1.0
    rounded: bool = True
    llama3: "Llama3 | None" = None

    @property
    def magnitude(self) -> float:
        """By which queries and keys are multiplied, so that scores are by its square (YaRN, section 3.3)."""
        return 1.0 if self.factor == 1 else 0.1 * self.mscale * math.log(self.factor) + 1.0


def rope_of(attention: AttentionTable, width: int, *, rounded: bool = True) -> Rope:
    """Return what a resolved configuration says."""
    yarn = attention.yarn_factor, attention.yarn_length, attention.yarn_mscale
    llama3 = None
    if (attention.llama3_factor or 1) > 1:
        llama3 = Llama3(
            attention.llama3_factor, attention.llama3_length, attention.llama3_low, attention.llama3_high
        )
    return Rope(width, attention.theta, *yarn, rounded, llama3)
