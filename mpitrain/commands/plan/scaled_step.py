"""A row of `mpitrain sweep --scaling`."""

from typing import NamedTuple


class ScaledStep(NamedTuple):
    """A step on the first `ranks` ranks.

    typed: the layout as it was typed. layout: what it is there. batch: sequences. Times are seconds
    of a step.
    """

    typed: str
    ranks: int
    layout: str
    batch: int
    measured_s: float
    predicted_s: float
    tokens_per_s: float
    predicted_tokens_per_s: float
    efficiency: float
    predicted_efficiency: float
    waiting_s: float
    predicted_waiting_s: float
