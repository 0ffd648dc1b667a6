"""What one axis of a rank has cost: counted where it happens, read as the difference of two readings.

    calls        operations started; a message between stages is one at each end
    num_bytes    sent by this rank, counted where a message is posted; `shared` sends nothing: read
                 from the others' memory
    blocked_s    the rank stood still for it: in wait(), or while it posted, copied and added what
                 had come
    in_flight_s  something was under way, from its start (a receive's too, which is started ahead)
                 until its end was noticed; operations side by side count once
    messages     sent by this rank, of any length; where MPI chooses the way of a collective, one to
                 each rank that gets something

Times are those of the mesh's clock (clocks.py); on a GPU, the computing queue stood still.
"""

from typing import NamedTuple

from mpitrain.comm.meters.clocks import HOST, Clock, Mark, Spans


class AxisUsage(NamedTuple):
    """A reading, or the difference of two."""

    calls: int = 0
    num_bytes: int = 0
    blocked_s: float = 0.0
    in_flight_s: float = 0.0
    messages: int = 0

    @property
    def overlapped_s(self) -> float:
        """The time with something under way while the rank computed, or waited for another axis."""
        return max(0.0, self.in_flight_s - self.blocked_s)

    def plus(self, other: "AxisUsage") -> "AxisUsage":
        """Return the sum."""
        return AxisUsage._make(a + b for a, b in zip(self, other))

    def minus(self, earlier: "AxisUsage") -> "AxisUsage":
        """Return what happened since an earlier reading."""
        return AxisUsage._make(a - b for a, b in zip(self, earlier))


class Account:
    """The account of one axis. parts: of axes that move its bytes, which add theirs.

    log: if it is a list, gets (operation, bytes of its buffer) of everything that is started.
    """

    def __init__(self) -> None:
        self.clock: Clock = HOST
        self.calls = 0
        self.num_bytes = 0
        self.messages = 0
        self.log: list[tuple[str, int]] | None = None
        self.parts: list[Account] = []
        self._blocked = Spans()
        self._flights = Spans()
        self._in_flight = 0
        self._since: Mark = None

    def note(self, operation: str, num_bytes: int) -> None:
        """Count an operation that is about to be started."""
        self.calls += 1
        if self.log is not None:
            self.log.append((operation, num_bytes))

    def begun(self, now: Mark) -> None:
        """An operation is under way from now on."""
        if not self._in_flight:
            self._since = now
        self._in_flight += 1

    def ended(self, now: Mark) -> None:
        """An operation is complete."""
        self._in_flight -= 1
        if not self._in_flight:
            self._flights.add(self.clock, self._since, now)

    def blocked(self, begin: Mark, end: Mark) -> None:
        """The rank stood still for it."""
        self._blocked.add(self.clock, begin, end)

    def read(self) -> AxisUsage:
        """Return the sums so far, with what is in flight now. Waits for a device: not within a step."""
        under_way_s = self.clock.seconds(self._since, self.clock.mark()) if self._in_flight else 0.0
        num_bytes, messages = (
            sum(getattr(account, what) for account in (self, *self.parts))
            for what in ("num_bytes", "messages")
        )
        return AxisUsage(
            self.calls, num_bytes, self._blocked.sum_s, self._flights.sum_s + under_way_s, messages
        )
