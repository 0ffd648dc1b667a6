"""Which number types a run computes, sums and sends with.

    precision.compute   activations, weights     master weights, gradients, moments, norms' statistics, softmax, loss
    fp64                fp64                     fp64
    fp32                fp32                     fp32
    bf16, fp16          that                     fp32
    fp8                 bf16                     fp32

fp8 is bf16 but for the linears of a block, whose factors are rounded to fp8 first (mpitrain/model/fp8.py).

16-bit types narrow the range too: fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before the backward and the
gradients divided by it after it (arXiv:1710.03740, section 3.2). The scale is halved when a gradient overflows, and such a step skipped;
it doubles after GROWTH steps without one.
"""

import torch

from mpitrain.config import Precision

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
START = 2.0**8  # of the scale: the loss is a sum over tokens, not a mean, so gradients of logits are up to 1
GROWTH = 200  # steps


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which sums of `dtype` are taken."""
    return torch.promote_types(dtype, torch.float32)


def wire_type(precision: Precision) -> torch.dtype | None:
    """Return the type gradients are rounded to before they are sent, if they are."""
    return None if precision.reduce == "same" else TYPES[precision.reduce]


class LossScale:
    """What the loss is multiplied by before the backward: a power of two, so that nothing is rounded by it. 1 unless fp16."""

    def __init__(self, precision: Precision):
        self.dynamic = precision.compute == "fp16"
        self.value, self.steps = (START if self.dynamic else 1.0), 0

    @property
    def state(self) -> list[float]:
        """What a run that goes on has to know."""
        return [self.value, self.steps]

    @state.setter
    def state(self, saved: list[float]) -> None:
        self.value, self.steps = saved

    def update(self, skipped: bool) -> None:
        """Take note of a step; all ranks agree on whether it was skipped, and so on the scale."""
        if not self.dynamic:
            return
        self.steps = 0 if skipped else self.steps + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self.steps == GROWTH:
            self.value, self.steps = self.value * 2, 0
