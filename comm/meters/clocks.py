"""Clocks that tell how long something took: the host's, or that of a device which is behind the host.

A mark is a moment of a clock. To launch work on a GPU takes the host no time: there a mark is an
event after what is queued, and is read when a step is over. Who trains on a device hands over its
clock (mpitrain/parallel/device_clock.py).
"""

import time
from typing import Any, Protocol

Mark = Any


class Clock(Protocol):
    """late: marks lie ahead, and to ask for the time between two waits for them."""

    late: bool

    def mark(self) -> Mark:
        """Return this moment, in the order of what the rank does."""

    def seconds(self, begin: Mark, end: Mark) -> float:
        """Return the time between two marks."""

    def now(self) -> tuple[Mark, float]:
        """Return this moment, and what time.perf_counter() says of it. Waits for a device."""


class HostClock:
    """time.perf_counter()."""

    late = False

    def mark(self) -> Mark:
        return time.perf_counter()

    def seconds(self, begin: Mark, end: Mark) -> float:
        seconds: float = end - begin
        return seconds

    def now(self) -> tuple[Mark, float]:
        moment = self.mark()
        return moment, moment


HOST = HostClock()


class Spans:
    """Time that adds up. What lies between marks of a late clock is added when it is asked for."""

    def __init__(self) -> None:
        self._sum_s = 0.0
        self._open: list[tuple[Clock, Mark, Mark]] = []

    def add(self, clock: Clock, begin: Mark, end: Mark) -> None:
        """Add the time between two marks."""
        if clock.late:
            self._open.append((clock, begin, end))
        else:
            self._sum_s += clock.seconds(begin, end)

    @property
    def sum_s(self) -> float:
        """The sum so far. Waits for marks that lie ahead."""
        while self._open:
            clock, begin, end = self._open.pop()
            self._sum_s += clock.seconds(begin, end)
        return self._sum_s
