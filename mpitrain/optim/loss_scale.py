"""Loss scaling, for gradients in fp16.

fp16 gradients below 6e-8 vanish, so the loss is multiplied by a scale before the backward and the
gradients divided by it after it (arXiv:1710.03740, section 3.2). The scale is halved when a
gradient overflows, and such a step skipped; it doubles after GROWTH steps without one.
"""

from mpitrain.config import Precision

# of the scale: the loss is a sum over tokens, not a mean, so gradients of logits are up to 1
START = 2.0**8
GROWTH = 200  # steps


class LossScale:
    """What the loss is multiplied by: a power of two, which rounds nothing. 1 unless fp16."""

    def __init__(self, precision: Precision):
        self.dynamic = precision.compute == "fp16"
        self.state = self._first

    @property
    def _first(self) -> list[float]:
        return [START if self.dynamic else 1.0, 0]

    @property
    def state(self) -> list[float]:
        """The state that a resumed run needs."""
        return [self.value, self.steps]

    @state.setter
    def state(self, saved: list[float]) -> None:
        self.value, self.steps = saved

    def resume(self, saved: list[float], compute: str) -> None:
        """Take a state saved with precision.compute = `compute`; begin anew if that had no scale."""
        self.state = saved if self.dynamic and compute == "fp16" else self._first

    def update(self, skipped: bool) -> None:
        """Take note of a step; all ranks agree on whether it was skipped, and so on the scale."""
        if not self.dynamic:
            return
        self.steps = 0 if skipped else self.steps + 1
        if skipped:
            self.value = max(1.0, self.value / 2)
        elif self.steps == GROWTH:
            self.value = self.value * 2
            self.steps = 0
