"""Rotary positions as a layer declares them (arXiv:2104.09864), with YaRN for sequences longer than was trained (arXiv:2309.00071)."""

import math
from dataclasses import dataclass

from mpitrain.config import Attention


@dataclass(frozen=True)
class Rope:
    """Rotary positions of the first `width` features of a head.

    theta: the slowest pair turns once in about 2 pi theta positions.
    factor, length: YaRN for sequences `factor` times as long as the `length` that was trained with; 1: none.
    mscale: by how much YaRN sharpens attention.  rounded: its ramp between fast and slow pairs begins and ends with a whole pair.
    """

    width: int
    theta: float
    factor: float = 1.0
    length: int = 0
    mscale: float = 1.0
    rounded: bool = True

    @property
    def magnitude(self) -> float:
        """By which queries and keys are multiplied, so that scores are by its square (YaRN, section 3.3)."""
        return 1.0 if self.factor == 1 else 0.1 * self.mscale * math.log(self.factor) + 1.0


def rope_of(attention: Attention, width: int, *, rounded: bool = True) -> Rope:
    """Return what a resolved configuration says."""
    return Rope(width, attention.theta, attention.yarn_factor, attention.yarn_length, attention.yarn_mscale, rounded)
