"""Point-to-point messages between the stages of pipeline parallelism.

Every message has a tag of its own: (kind, stage, microbatch). Schedules consume messages in another
order than they were sent (all V-shaped ones do): the order of posting must not decide which it is.
"""

from functools import partial
from typing import NamedTuple

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import Array, flat
from mpitrain.comm.base.world import ExpectedAction
from mpitrain.comm.device.staging import written
from mpitrain.comm.progress import Arrived, Pending, Steps
from mpitrain.comm.transports import messages
from mpitrain.errors import MeshError

KINDS = ("F", "B")  # an activation to the next stage; a gradient to the previous one


class Message(NamedTuple):
    """`kind` of `microbatch`, for `stage`; peer: the coordinate of the rank at its other end."""

    kind: str
    stage: int
    microbatch: int
    peer: int
    leaving: bool

    def __str__(self) -> str:
        way = f"to be taken by rank {self.peer}" if self.leaving else f"from rank {self.peer}"
        return f"{self.kind}{self.microbatch} for stage {self.stage} {way} of links"


def _send(axis: Axis, to: int, tag: int, synchronous: bool, x: Array) -> Steps:
    """Send `x` when it is there. synchronous: complete when it is received."""
    yield from written(x)
    yield Arrived(messages.send(axis, x, to, tag, synchronous=synchronous))


def _receive(axis: Axis, source: int, tag: int, x: Array) -> Steps:
    yield from written(x)
    yield Arrived(messages.receive(axis, x, source, tag))


class Links:
    """All links of one rank along the pipeline axis. A step's messages end with it: tags return."""

    def __init__(self, axis: Axis, num_stages: int, num_microbatches: int, *, synchronous: bool = False):
        self.axis = axis
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.synchronous = synchronous
        largest = axis.num_tags
        needed = len(KINDS) * num_stages * num_microbatches
        if needed > largest:
            raise MeshError(
                f"{num_stages} stages x {num_microbatches} microbatches need {needed} tags, this MPI has "
                f"{largest}; use larger microbatches (batch.micro)"
            )

    def tag(self, kind: str, stage: int, microbatch: int) -> int:
        """Return the tag of the message that `stage` sends or is sent; unique within a step."""
        return (KINDS.index(kind) * self.num_stages + stage) * self.num_microbatches + microbatch

    def send(
        self,
        kind: str,
        stage: int,
        microbatch: int,
        x: Array,
        to: int,
        expected: ExpectedAction | None = None,
    ) -> Pending:
        """Start sending `x`, for `stage`, to coordinate `to`. The Pending owns `x` until wait().

        expected: what receives it, for a hang report.
        """
        x = flat(x)
        tag = self.tag(kind, stage, microbatch)

        steps = partial(_send, self.axis, to, tag, self.synchronous)
        what = Message(kind, stage, microbatch, to, leaving=True)
        return self.axis.start(steps, "send", x.nbytes, reads=[x], what=what, expected=expected)

    def receive(
        self,
        kind: str,
        stage: int,
        microbatch: int,
        out: Array,
        source: int,
        expected: ExpectedAction | None = None,
    ) -> Pending:
        """Start receiving into `out`, the result, what coordinate `source` sends for `stage`.

        expected: what sends it, for a hang report.
        """
        x = flat(out)
        tag = self.tag(kind, stage, microbatch)

        steps = partial(_receive, self.axis, source, tag)
        what = Message(kind, stage, microbatch, source, leaving=False)
        return self.axis.start(
            steps, "receive", x.nbytes, writes=[x], result=out, what=what, expected=expected
        )
