"""What travels between data ranks while a rank computes.

Parameters that are gathered and gradients that are reduced.

A rank has one more resource for them, on which transfers follow one another. GATHER and REDUCE end
at once and start a transfer; a part starts when the buckets it needs have arrived, and NORM when
everything has.

    GATHER of a, b   |--a--|--b--|
    part that needs a      |--F--|        the next, which needs b, has it in time

A SUM travels over another axis, for which there is another resource; what follows it or a REDUCE in
a bucket's chain (see sums) starts when it has arrived. The other ranks of an axis are taken to
start when this one does.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from mpitrain.schedules.actions import OF_GRADIENTS, Action
from mpitrain.schedules.lowering.residency import Key, Residency

TRANSFERS = ("GATHER", "SUM", "REDUCE")


class Transfers(NamedTuple):
    """Times of the transfers of one bucket, by kind (GATHER, SUM, REDUCE) or by instruction.

    Who waits for them is in the residency.
    """

    time: Mapping[str, float] | Callable[[Action], float]
    residency: Residency | None = None

    def of(self, action: Action) -> float:
        return self.time(action) if callable(self.time) else self.time.get(action.kind, 0)

    def needed(self, action: Action) -> Iterable[Key]:
        return self.residency.needed(action) if self.residency else ()


NO_TIME = Transfers({})


class RankTransfers:
    """The transfers of one rank, while it is played.

    free: when the way of data ranks is, and that of other axes.
    """

    def __init__(self, transfers: Transfers):
        self.transfers = transfers
        self.free: float = 0
        self.free_for_sums: float = 0
        self.arrived: dict[Key, float] = {}
        self.summed: dict[Key, float] = {}
        self.reduced: dict[Key, float] = {}

    def start(self, action: Action, time: float) -> None:
        """Start the transfer of a GATHER, SUM or REDUCE, after those before it."""
        key = (action.stage, action.index)
        if action.kind == "SUM":
            self.summed[key] = self.free_for_sums = max(time, self.free_for_sums) + self.transfers.of(action)
            return
        self.free = max(time, self.free) + self.transfers.of(action)
        (self.arrived if action.kind == "GATHER" else self.reduced)[key] = self.free

    def ready(self, action: Action, time: float) -> float:
        """Return when an action that is reached at `time` has what it waits for."""
        if action.kind == "NORM":
            return max(time, self.free, self.free_for_sums)
        if action.kind in OF_GRADIENTS:
            before = (self.summed, self.reduced) if action.kind == "SUM" else (self.summed,)
            return max([time, *(found.get((action.stage, action.index), time) for found in before)])
        return max([time, *(self.arrived.get(key, time) for key in self.transfers.needed(action))])
