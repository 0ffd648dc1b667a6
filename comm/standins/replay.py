"""Axes of a rank of any layout that runs alone, without MPI: what came to it is from a recording.

On an axis of one rank nothing comes from elsewhere.
"""

from collections.abc import Callable, Sequence

import numpy as np

from mpitrain.comm.base.buffers import NOTHING, Array, copy, empty_like, is_tensor, typed_like
from mpitrain.comm.base.world import NULL_REPORTER, StatusReporter
from mpitrain.comm.progress import Pending, Steps
from mpitrain.comm.standins.rehearsal import RecordingAxis, SilentMesh
from mpitrain.comm.tap import Tap, TappedOperation

# fills the buffers of an operation with what came of it
Came = Callable[[TappedOperation, Sequence[Array]], None]


class ReplayAxis(RecordingAxis):
    """One axis. came: fills buffers.  tap: hears what is given.  place: knows the instruction."""

    one_node = True
    came: Came
    tap: Tap
    place: StatusReporter = NULL_REPORTER
    num_started = 0

    # whoever starts an operation knows an Axis: the types are those of its start()
    def start(  # type: ignore[override]  # see above
        self,
        operation: Callable[..., Steps],
        name: str,
        num_bytes: int,
        *,
        reads: Sequence[Array] = (),
        writes: Sequence[Array] = (),
        given: slice = NOTHING,
        result: Array | None = None,
        **others: object,
    ) -> Pending:
        """Take what came of an operation, which is complete then."""
        which = TappedOperation(self.name, self.num_started, name, self.place.what)
        self.num_started = self.num_started + 1
        self.tap.given(which, [*reads, *(x[given] for x in writes)])
        self.account.note(name, num_bytes)
        if self.size > 1 and writes:
            self.came(which, writes)
        elif reads and writes:
            copy(reads[0], writes[0])
        return self.progress.start(iter(()), name, self.account, result)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Return zeroed memory."""
        return np.zeros(num_bytes, np.uint8)


class ReplayMesh(SilentMesh):
    """The axes of a rank, filled from a recording; the first arguments are those of SilentMesh."""

    axis_type = ReplayAxis

    def listen(self, tap: Tap, came: Came, place: StatusReporter) -> None:
        """Replay from here on, every axis from its first operation."""
        for axis in self.axes.values():
            assert isinstance(axis, ReplayAxis)
            axis.tap = tap
            axis.came = came
            axis.place = place
            axis.num_started = 0


def fill(parts: Sequence[np.ndarray], buffers: Sequence[Array]) -> None:
    """Copy bytes over flat buffers. Raises ValueError if they aren't as many, or as long."""
    for part, buffer in zip(parts, buffers, strict=True):
        values = typed_like(
            empty_like(buffer, 0).cpu() if is_tensor(buffer) else buffer, np.ascontiguousarray(part)
        )
        if len(values) != len(buffer):
            raise ValueError(f"{len(values)} elements for {len(buffer)}")
        copy(values, buffer)
