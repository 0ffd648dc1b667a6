"""Point-to-point messages between the stages of pipeline parallelism.

Every message has a tag of its own, made from what it carries: (kind, stage, microbatch). Schedules
consume messages in another order than they were sent (all V-shaped ones do), so the order of
posting must never decide which tensor arrives where.
"""

from typing import NamedTuple

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import Array, flat
from mpitrain.comm.base.world import ExpectedAction
from mpitrain.comm.device.staging import written
from mpitrain.comm.progress import Pending, Steps, arrived
from mpitrain.comm.transports import messages
from mpitrain.errors import MeshError

KINDS = ("F", "B")  # an activation to the next stage; a gradient to the previous one


class Message(NamedTuple):
    """One message between stages.

    `kind` of `microbatch`, for `stage`; peer: the coordinate of the rank at its other end.
    """

    kind: str
    stage: int
    microbatch: int
    peer: int
    leaving: bool

    def __str__(self) -> str:
        way = f"to be taken by rank {self.peer}" if self.leaving else f"from rank {self.peer}"
        return f"{self.kind}{self.microbatch} for stage {self.stage} {way} of links"


class Send(NamedTuple):
    """A message to the rank with coordinate `to` of an axis. synchronous: complete when it is received."""

    axis: Axis
    to: int
    tag: int
    synchronous: bool

    def steps(self, x: Array) -> Steps:
        """Send `x` when it is there."""
        yield from written(x)
        yield arrived(messages.send(self.axis, x, self.to, self.tag, synchronous=self.synchronous))


class Receive(NamedTuple):
    """A message from the rank with coordinate `source` of an axis."""

    axis: Axis
    source: int
    tag: int

    def steps(self, x: Array) -> Steps:
        """Receive into `x` when it may be written."""
        yield from written(x)
        yield arrived(messages.receive(self.axis, x, self.source, self.tag))


class Links:
    """All links of one rank along the pipeline axis.

    The same tags return every step: a step ends with every message received.
    """

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
        """Start sending `x`, which is for `stage`, to the rank with coordinate `to`.

        The Pending owns `x` until wait().

        expected: what receives it, for a hang report.
        """
        x = flat(x)
        tag = self.tag(kind, stage, microbatch)

        operation = Send(self.axis, to, tag, self.synchronous)
        what = Message(kind, stage, microbatch, to, leaving=True)
        return self.axis.start(operation.steps, "send", x.nbytes, reads=[x], what=what, expected=expected)

    def receive(
        self,
        kind: str,
        stage: int,
        microbatch: int,
        out: Array,
        source: int,
        expected: ExpectedAction | None = None,
    ) -> Pending:
        """Start receiving into `out` what the rank with coordinate `source` sends for `stage`.

        The Pending's result is `out`.

        expected: what sends it, for a hang report.
        """
        x = flat(out)
        tag = self.tag(kind, stage, microbatch)

        operation = Receive(self.axis, source, tag)
        what = Message(kind, stage, microbatch, source, leaving=False)
        return self.axis.start(
            operation.steps, "receive", x.nbytes, writes=[x], result=out, what=what, expected=expected
        )
