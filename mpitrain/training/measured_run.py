"""What a run has measured when it ends, for a comparison with what was predicted."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from mpitrain.comm.meters.account import AxisUsage
from mpitrain.plan.plan import Plan

REMEMBERED = 1000  # steps, the last ones


class MeasuredRun(NamedTuple):
    """A run, as rank 0 knows it at the end.

    step_s: the median step, of num_steps. usages: of each rank by axis, of all steps but the first.
    counted: how many these are. node_ranks: ranks of a node. node_cores: that these may use.
    gpu: name of rank 0's; "" for none.
    peak: FLOP/s of a rank, which MFU is a share of.
    predicted_bytes, held_bytes: of rank 0 at most; None: nobody knows.
    """

    plan: Plan
    step_s: float
    num_steps: int
    usages: Sequence[Mapping[str, AxisUsage]]
    counted: int
    node_ranks: int
    node_cores: int
    gpu: str
    peak: float
    predicted_bytes: int
    held_bytes: int | None


Compare = Callable[[MeasuredRun], str]


class StepTimes:
    """The seconds of the last steps, without the first of a start, which is never typical."""

    def __init__(self) -> None:
        self._took = deque[float](maxlen=REMEMBERED)
        self._begun = False

    def add(self, step_s: float) -> None:
        if self._begun:
            self._took.append(step_s)
        self._begun = True

    def __len__(self) -> int:
        return len(self._took)

    @property
    def median_s(self) -> float:
        return median(self._took)
