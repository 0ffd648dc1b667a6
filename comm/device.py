"""Device buffers: what MPI may touch, and the way through pinned host memory when it may not.

A wrong belief about CUDA-awareness is a segmentation fault, so the answer is taken from what the library itself says, and counts
as "no" when it says nothing.
"""

import ctypes
import sys
from collections.abc import Callable

from mpi4py import MPI

from mpitrain.comm.buffers import Array, on_device
from mpitrain.comm.progress import Ready, Steps


def cuda_awareness() -> tuple[bool, str]:
    """Return whether this MPI takes CUDA buffers, and how we know. Needs MPI to be initialised.

    MPI 4.1 answers with the info key mpi_memory_alloc_kinds; Open MPI and MPICH have MPIX_Query_cuda_support.
    """
    info = MPI.COMM_WORLD.Get_info()
    kinds = info.Get("mpi_memory_alloc_kinds") or ""
    info.Free()
    if "cuda" in kinds:
        return True, f"mpi_memory_alloc_kinds = {kinds}"
    try:
        query = ctypes.CDLL(None).MPIX_Query_cuda_support
    except (AttributeError, OSError):
        return False, f"mpi_memory_alloc_kinds = {kinds or 'not set'}, and the library has no MPIX_Query_cuda_support"
    query.restype = ctypes.c_int
    answer = bool(query())
    return answer, f"MPIX_Query_cuda_support() = {int(answer)}"


def written(x: Array) -> Ready:
    """Return whether the work queued so far on the current stream, which writes `x`, is done. MPI knows no streams."""
    event = sys.modules["torch"].cuda.Event()
    event.record(sys.modules["torch"].cuda.current_stream(x.device))
    return event.query


def settled(x: Array) -> Steps:
    """Wait, before `x` or memory made after it is handed to MPI, until the work queued for its device is done; host memory is ready."""
    if on_device(x):
        yield written(x)


def reachable(operation: Callable[..., Steps], reads: list[Array], writes: list[Array], device_aware: bool) -> Steps:
    """Return operation(*reads, *writes), by way of the host if the buffers are on a device that MPI can't read."""
    if on_device((*reads, *writes)[0]) and not device_aware:
        return staged(operation, reads, writes)
    return operation(*reads, *writes)


def staged(operation: Callable[..., Steps], reads: list[Array], writes: list[Array]) -> Steps:
    """Run `operation(*reads, *writes)` on pinned host copies of device buffers and copy the written ones back."""
    hosts = [sys.modules["torch"].empty(x.shape, dtype=x.dtype, pin_memory=True) for x in (*reads, *writes)]
    for x, host in zip((*reads, *writes), hosts):
        host.copy_(x, non_blocking=True)
    yield written((*reads, *writes)[0])
    yield from operation(*hosts)
    for x, host in zip(writes, hosts[len(reads) :]):
        x.copy_(host, non_blocking=True)
    yield written((*reads, *writes)[0])
