"""The clock of a GPU: events in the queue that computes, read when a step is over."""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch

from mpitrain.comm.meters.clocks import HOST, Clock


class TimedEvent(Protocol):
    """torch.cuda.Event(enable_timing=True), or what is like it."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "TimedEvent") -> float:
        """Return the milliseconds until another event, both of which are over."""


class DeviceClock:
    """A mark is an event after all that is queued to compute.

    It comes when that is over, and if there is nothing, now.

    So what a rank waits for while its GPU is busy costs no time, and what it waits for while the
    GPU is idle does. Nothing waits for the GPU but who asks for a time. make: makes events.
    """

    late = True

    def __init__(self, make: Callable[[], TimedEvent]):
        self._make = make

    def mark(self) -> TimedEvent:
        event = self._make()
        event.record()
        return event

    def seconds(self, begin: TimedEvent, end: TimedEvent) -> float:
        begin.synchronize()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    def now(self) -> tuple[TimedEvent, float]:
        event = self.mark()
        event.synchronize()
        return event, time.perf_counter()


def clock_of(device: torch.device) -> Clock:
    """Return the clock by which work on a device is timed."""
    return DeviceClock(partial(torch.cuda.Event, enable_timing=True)) if device.type == "cuda" else HOST
