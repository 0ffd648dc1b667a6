"""Device buffers: what MPI may touch, and the way through pinned host memory when it may not.

comm/device/gpu_support.py says which. torch calls AMD's devices `cuda`, too, and so does this file.

What an operation copies or adds on the device is queued on the stream that is current then: one on
buffers that go straight to MPI is started, polled and waited for with one current stream; a staged
one is over when its copies are.
"""

import sys
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

from mpitrain.comm.base.buffers import Array, on_device
from mpitrain.comm.progress import Steps


class Written:
    """Whether the work queued on the current stream, which writes `x`, is done: MPI knows no streams."""

    def __init__(self, x: Array):
        cuda = sys.modules["torch"].cuda
        self._event = cuda.Event()
        self._event.record(cuda.current_stream(x.device))

    def __call__(self) -> bool:
        done: bool = self._event.query()
        return done

    def waiting_on(self) -> tuple[()]:
        """Return nobody: it is this rank's own device that is waited for."""
        return ()


class HasSize(Protocol):
    """What has ranks; an axis."""

    size: int


def settled(x: Array, axis: HasSize) -> Steps:
    """Wait, before MPI gets `x` or memory made after it, for the work queued on its device.

    Host memory is ready, and an axis of one rank hands nothing over.
    """
    if axis.size > 1:
        yield from written(x)


def written(x: Array) -> Steps:
    """Wait until the work queued for the device of `x` is done, whoever it is for."""
    if on_device(x):
        yield Written(x)


def reachable(
    operation: Callable[..., Steps],
    reads: Sequence[Array],
    writes: Sequence[Array],
    given: slice,
    device_aware: bool,
) -> Steps:
    """Call operation(*reads, *writes), by way of the host if MPI can't read the buffers' device."""
    if any(map(on_device, (*reads, *writes))) and not device_aware:
        return staged(operation, reads, writes, given)
    return operation(*reads, *writes)


def staged(
    operation: Callable[..., Steps], reads: Sequence[Array], writes: Sequence[Array], given: slice
) -> Steps:
    """Call `operation(*reads, *writes)` on pinned host memory: its place on its axis is taken now.

    Carry there what it reads, `given` of `writes`, too; carry back `writes`.
    """
    inside, outside = (
        [sys.modules["torch"].empty_like(x, device="cpu", pin_memory=True) for x in buffers]
        for buffers in (reads, writes)
    )
    needed = [
        (x, host)
        for x, host in (*zip(reads, inside), *((x[given], host[given]) for x, host in zip(writes, outside)))
        if len(x)
    ]
    back = [(host, x) for x, host in zip(writes, outside)]
    # what is queued by now may still use what is written; the copies back may be on another stream
    before = [Written(x) for x in writes[:1]]
    return chain(_carried(needed), operation(*inside, *outside), before, _carried(back))


def _carried(pairs: list[tuple[Array, Array]]) -> Steps:
    """Copy each source to its target, one of them pinned, after the current stream's work."""
    for source, target in pairs:
        target.copy_(source, non_blocking=True)
    if pairs:
        yield Written(next(x for x in pairs[0] if on_device(x)))
