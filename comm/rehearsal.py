"""Axes on which nothing travels: an operation is noted, and complete as soon as it is started.

For whoever wants to know what a rank of some layout would start: any rank, in one process, without MPI being initialised.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from mpitrain.comm.account import Account
from mpitrain.comm.buffers import Array
from mpitrain.comm.carried import NOTHING, Carried
from mpitrain.comm.progress import Pending, Progress, Steps


class SilentAxis:
    """What mpitrain.comm.axis.Axis is to those who start operations. Each is noted in account.log."""

    def __init__(self, name: str, rank: int, size: int, carried: Carried, progress: Progress):
        self.name, self.rank, self.size, self.carried, self.progress = name, rank, size, carried, progress
        self.device_aware, self.num_tags = False, 2**31 - 1
        self.account = Account()
        self.account.log = []

    def start(
        self, operation: Callable[..., Steps], name: str, num_bytes: int, *, result: Array | None = None, **others: object
    ) -> Pending:
        """Note an operation, which is never called; zeros come of it."""
        assert self.carried.allows(name, self.size), f"axis {self.name} is made for {sorted(self.carried.operations)}, not {name}"
        self.account.note(name, num_bytes)
        if isinstance(result, np.ndarray):
            result[...] = 0
        return self.progress.start(iter(()), name, self.account, result)


class SilentMesh:
    """The axes of `rank`, by their names: axes and carried as for mpitrain.comm.mesh.Mesh."""

    axis_type: type["SilentAxis"] = SilentAxis

    def __init__(self, rank: int, axes: Mapping[str, Sequence[int]], carried: Mapping[str, Carried]):
        self.rank, self.progress = rank, Progress()
        self.axes = {
            name: self.axis_type(name, ranks.index(rank), len(ranks), carried.get(name, NOTHING), self.progress)
            for name, ranks in axes.items()
        }

    def __getitem__(self, name: str) -> SilentAxis:
        return self.axes[name]

    def started(self) -> dict[str, list[tuple[str, int]]]:
        """Return (operation, bytes of its buffer) of what was started on each axis of more than one rank, and forget it."""
        found = {name: axis.account.log for name, axis in self.axes.items() if axis.size > 1 and axis.account.log}
        for axis in self.axes.values():
            axis.account.log = []
        return found
