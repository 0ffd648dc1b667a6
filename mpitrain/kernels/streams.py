"""Queues of a device's work: what computes, and what copies beside it.

On a GPU a queue is a CUDA stream: what is queued in one happens in its order, what is queued in
another whenever it likes, unless it waits. On a CPU all is over when a call returns, so that every
machine can run who uses them; and tests hand over a device that is late on purpose
(tests/support/late_device.py).

Memory of the device belongs to the queue that computes: who is given it may compute with it at
once, and what is dropped is given to the next one who asks, before what was computed with it is
over. So another queue writes to it only after what is queued to compute then, and it is dropped
only when what computes waits for what other queues do with it.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from mpitrain.kernels.pinned import on_host


class QueueEvent(Protocol):
    """A place in a queue."""

    def query(self) -> bool:
        """Return whether all that is queued before it is over."""

    def synchronize(self) -> None:
        """Have the host wait until it is."""


class Queue(Protocol):
    """A queue of a device."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. Both stay what they are until it is over: nobody else keeps them there."""

    def record(self) -> QueueEvent:
        """Return the place after what is queued now."""

    def wait(self, event: QueueEvent) -> None:
        """Let what is queued from now on happen after an event of any queue. The host doesn't wait."""


class Streams(Protocol):
    """The queues of a device. compute: the one on which torch computes."""

    device: torch.device
    compute: Queue

    def further(self) -> Queue:
        """Return a new queue."""

    def has(self, tensor: torch.Tensor) -> bool:
        """Tell whether a tensor is in the device's memory."""

    def on_device(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of the device, for what is computed next."""
        return torch.empty(length, dtype=dtype, device=self.device)

    def on_host(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory of the host that queues can copy from and to."""
        return on_host(length, dtype, self.device)


def streams_of(device: torch.device) -> Streams:
    """Return the queues of a device."""
    return OfGpu(device) if device.type == "cuda" else AtOnce(device)


class Over:
    """An event that was over when it was recorded."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


OVER = Over()


class AtOnce(Streams):
    """The only queue of a CPU, and of the device that has shapes only."""

    def __init__(self, device: torch.device):
        self.compute: Queue = self
        self.device = device

    def further(self) -> Queue:
        return self

    def has(self, tensor: torch.Tensor) -> bool:
        return True

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def record(self) -> QueueEvent:
        return OVER

    def wait(self, event: QueueEvent) -> None:
        pass


class OfGpu(Streams):
    """The streams of a GPU."""

    def __init__(self, device: torch.device):
        self.device = device
        self.compute = _Stream(lambda: torch.cuda.current_stream(device))

    def further(self) -> Queue:
        stream = torch.cuda.Stream(self.device)
        return _Stream(lambda: stream)

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda  # what attention keeps of its dropout, a seed, is not


class _Stream:
    """A CUDA stream. find: returns it; which one computes may change."""

    def __init__(self, find: Callable[[], torch.cuda.Stream]):
        self._find = find

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self._current():
            target.copy_(source, non_blocking=True)

    def record(self) -> QueueEvent:
        return self._find().record_event()

    def wait(self, event: QueueEvent) -> None:
        if event is not OVER:  # memory that nobody has used yet; CUDA has no such event
            self._find().wait_event(event)

    def _current(self) -> AbstractContextManager:
        return torch.cuda.stream(self._find())
