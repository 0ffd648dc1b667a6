"""What a run has measured when it ends, for a comparison with what was predicted. Light."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from mpitrain.comm.meters.account import AxisUsage
from mpitrain.plan.plan import Plan


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
