"""A device that is late on purpose, for what is handed its queues (mpitrain/kernels/streams.py).

Its memory is a piece of host memory, given out and taken back as torch's allocator for a GPU does:
at once, in the order of the program, for what the computing queue does next. What is queued happens
when a seeded clock says so: in its order in one queue, and in any order between queues, but for
what waits. Memory that nobody has written, or that was dropped, is full of GARBAGE as soon as the
computing queue comes by. So what is read too early, kept too short, or overwritten while somebody
reads it, is a wrong number.
"""

import random
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

GARBAGE = 113.0


class Event:
    """The place after what a queue had when it was recorded."""

    def __init__(self, queue: "LateQueue"):
        self.queue = queue
        self.place = len(queue.work)

    @property
    def over(self) -> bool:
        return self.queue.happened >= self.place

    def query(self) -> bool:
        self.queue.device.tick()
        return self.over

    def synchronize(self) -> None:
        self.queue.device.num_waits += 1
        while not self.over:
            self.queue.device.tick(certainly=True)


class LateQueue:
    """Work in its order: functions that happen, and events that are waited for."""

    def __init__(self, device: "Device"):
        self.device = device
        self.work = []
        self.happened = 0
        self.speed = device.random.choice([0.02, 0.3, 1.0])  # beside the others

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        there = self.device.address(target)
        here = self.device.address(source)
        self.run(lambda: there().copy_(here()))

    def run(self, function: Callable[[], Any]) -> None:
        self.work.append(function)
        self.device.tick()

    def record(self) -> Event:
        return Event(self)

    def wait(self, event: Event) -> None:
        if isinstance(event, Event):  # the other kind is over
            self.work.append(event)

    def advance(self) -> bool:
        """Let the next thing happen, if there is one and it waits for nothing."""
        if self.happened == len(self.work):
            return False
        next_ = self.work[self.happened]
        if not isinstance(next_, Event):
            next_()
        elif not next_.over:
            return False
        self.work[self.happened] = None
        self.happened += 1
        return True


class Device:
    """The device: `compute` and further queues, and `num_bytes` of memory.

    most: the most of it that was lent at once.
    """

    def __init__(self, seed: int, num_bytes: int = 1 << 18):
        self.random = random.Random(seed)
        # how often something happens while the host continues
        self.speed = self.random.choice([0.05, 0.3, 1.0])
        self.compute = LateQueue(self)
        self.queues = [self.compute]
        # the device's time; how often the host has waited for it
        self.now = 0.0
        self.num_waits = 0
        self._memory = np.full(num_bytes // 4, GARBAGE, np.float32)
        self._tensor = torch.from_numpy(self._memory)
        self._free = [(0, num_bytes // 4)]  # from, until
        self.lent = self.most = 0

    # ------------------------------------------------------------ as Streams

    def further(self) -> LateQueue:
        self.queues.append(LateQueue(self))
        return self.queues[-1]

    def has(self, tensor: torch.Tensor) -> bool:
        return 0 <= tensor.data_ptr() - self._tensor.data_ptr() < self._memory.nbytes

    def on_device(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        assert dtype == torch.float32
        place = next(i for i, (begin, end) in enumerate(self._free) if end - begin >= length)
        begin, end = self._free.pop(place)
        if end - begin > length:
            self._free.append((begin + length, end))
        self._free.sort()
        self.lent += length
        self.most = max(self.most, self.lent)
        memory = self._memory[begin : begin + length].view(_Lent)
        weakref.finalize(memory, self._take_back, begin, begin + length)
        return torch.from_numpy(memory)

    def on_host(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((length,), GARBAGE, dtype=dtype)

    def timed(self) -> "Timed":
        """Return what torch.cuda.Event(enable_timing=True) is."""
        return Timed(self)

    # ------------------------------------------------------------ for tests

    def busy(self, seconds: float) -> None:
        """Queue something to compute that takes its time."""
        self.compute.run(lambda: setattr(self, "now", self.now + seconds))

    def idle(self, seconds: float) -> None:
        """The host does something else: if nothing is queued to compute, the device stands still
        meanwhile.
        """
        if self.compute.happened == len(self.compute.work):
            self.now += seconds

    def put(self, values: torch.Tensor) -> torch.Tensor:
        """Return a tensor that will hold some values."""
        x = self.on_device(values.numel(), values.dtype).view(values.shape)
        there = self.address(x)
        self.compute.run(lambda: there().copy_(values))
        return x

    def address(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return what finds the numbers at the place of a tensor, without keeping it.

        A kernel has addresses only.
        """
        if not self.has(x):
            return lambda: x
        size = x.size()
        stride = x.stride()
        offset = (x.data_ptr() - self._tensor.data_ptr()) // 4
        return lambda: self._tensor.as_strided(size, stride, offset)

    def tick(self, certainly: bool = False) -> None:
        """Let time pass. certainly: until something has happened."""
        if not certainly and self.random.random() >= self.speed:
            return
        speeds = [queue.speed for queue in self.queues]
        happened = False
        for queue in self.random.choices(self.queues, speeds, k=self.random.randrange(1, 6)):
            happened |= queue.advance()
        if certainly and not happened:
            assert any(queue.advance() for queue in self.queues), "every queue waits for another"

    def finish(self) -> None:
        for queue in self.queues:
            queue.record().synchronize()

    def _take_back(self, begin: int, end: int) -> None:
        self.lent -= end - begin
        spans = sorted([*self._free, (begin, end)])
        self._free = []
        for span in spans:
            if self._free and self._free[-1][1] == span[0]:
                span = self._free.pop()[0], span[1]
            self._free.append(span)
        self.compute.work.append(lambda: self._tensor[begin:end].fill_(GARBAGE))


class Timed:
    """An event that knows when it was over."""

    def __init__(self, device: Device):
        self._device = device

    def record(self) -> None:
        self._device.compute.run(lambda: setattr(self, "at", self._device.now))
        self._event = self._device.compute.record()

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: "Timed") -> float:
        return (end.at - self.at) * 1e3


class _Lent(np.ndarray):
    """Memory that tells when it is dropped."""


class Eager(Device):
    """What computes is this process, and only what is queued beside it is late.

    So that a whole model can run. Its memory is torch's.
    """

    def __init__(self, seed: int):
        super().__init__(seed, 0)
        self.compute = _Now(self)
        self.num_copies = 0

    def has(self, tensor: torch.Tensor) -> bool:
        return True

    def address(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.num_copies += 1
        return lambda: x

    def on_device(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        return self.on_host(length, dtype)


class _Now(LateQueue):
    """Nothing is ever queued in it: it waits at once."""

    def wait(self, event: Event) -> None:
        event.synchronize()
