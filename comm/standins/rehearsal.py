"""Axes on which nothing travels: an operation is noted, and complete when it is waited for.

They show what a rank of any layout would start and wait for, in one process, without MPI.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpitrain.comm.base.axis_operations import NOTHING, AxisOperations
from mpitrain.comm.base.buffers import Array
from mpitrain.comm.links import Message
from mpitrain.comm.meters.account import Account
from mpitrain.comm.progress import Progress, Steps
from mpitrain.comm.standins.recipe import Event, Start, Wait


class Script:
    """The events of one rank. num_started: operations so far, those of events that were taken included."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.num_started = 0

    def start(self, event: Start, result: Any) -> "SilentPending":
        """Note that an operation was started."""
        self.events.append(event)
        self.num_started += 1
        return SilentPending(self, self.num_started - 1, result)

    def take(self) -> list[Event]:
        """Return the events since the last call, operations numbered from there, and forget them."""
        events = self.events
        self.events = []
        first = self.num_started - sum(isinstance(event, Start) for event in events)
        return [Wait(event.number - first) if isinstance(event, Wait) else event for event in events]


class SilentPending:
    """An operation that is complete once somebody has waited for it: all that can be relied on."""

    def __init__(self, script: Script, number: int, result: Any):
        self._script = script
        self._number = number
        self._result = result
        self.done = False

    def wait(self) -> Any:
        """Note that the rank waits, and return the result."""
        if not self.done:
            self._script.events.append(Wait(self._number))
        self.done = True
        return self._result


class RecordingAxis:
    """What mpitrain.comm.axis.Axis is to those who start operations; each is noted in the script.

    Only those on an axis of several ranks.
    """

    def __init__(
        self, name: str, rank: int, size: int, carried: AxisOperations, progress: Progress, script: Script
    ):
        self.name = name
        self.rank = rank
        self.size = size
        self.carried = carried
        self.progress = progress
        self.device_aware = False
        self.num_tags = 2**31 - 1
        self.account = Account()
        self._script = script if size > 1 else Script()

    def start(
        self,
        operation: Callable[..., Steps] | None,
        name: str,
        num_bytes: int,
        *,
        result: Array | None = None,
        what: object = "",
        **others: object,
    ) -> SilentPending:
        """Note an operation, which is never called; zeros come of it."""
        assert self.carried.allows(name, self.size), (
            f"axis {self.name} is made for {sorted(self.carried.operations)}, not {name}"
        )
        if isinstance(result, np.ndarray):
            result[...] = 0
        return self._script.start(
            Start(self.name, name, num_bytes, what if isinstance(what, Message) else None), result
        )


class SilentMesh:
    """The axes of `rank`, by their names: axes and carried as for mpitrain.comm.mesh.Mesh."""

    axis_type: type["RecordingAxis"] = RecordingAxis
    cores_of_rank = 1

    def __init__(self, rank: int, axes: Mapping[str, Sequence[int]], carried: Mapping[str, AxisOperations]):
        self.rank = rank
        self.progress = Progress()
        self.script = Script()
        self.axes = {
            name: self.axis_type(
                name, ranks.index(rank), len(ranks), carried.get(name, NOTHING), self.progress, self.script
            )
            for name, ranks in axes.items()
        }

    def __getitem__(self, name: str) -> RecordingAxis:
        return self.axes[name]
