"""What a forward keeps for its backward, and where: `memory.recompute = "selective"` and `memory.offload`.

Tensors that wait in host memory are sent there as they are kept. When the backward begins with a
block, the block before it is fetched; there and back are queues of their own (kernels/streams.py):

    compute  forward 0 | forward 1 | forward 2 | forward 3  backward 3 | backward 2 | backward 1
    there                0           1           2 ...
    back                                                                 1            0

A GPU computes faster than it sends, and the host is ahead of both. So forward k + 2 waits on the
GPU until what block k left has gone, and then its memory is free: at most AHEAD blocks are leaving,
whatever the host does, and at most two are there again. What hasn't gone when the backward asks for
it stays.

On a CPU a copy in host memory saves nothing and costs a copy each way; it is there so that every
machine can test it.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mpitrain.kernels.streams import OVER, QueueEvent, Streams

AHEAD = 2  # blocks of which something may be leaving while a forward runs, its own included


class Host:
    """Host memory for tensors of a device, in buffers that are used again, and the queues there and back."""

    def __init__(self, streams: Streams):
        self.streams = streams
        self.compute = streams.compute
        self.there = streams.further()
        self.back = streams.further()
        self._free: dict[tuple[int, torch.dtype], deque[tuple[torch.Tensor, QueueEvent]]] = defaultdict(deque)
        # by block, the last one's forward is running
        self._leaving: deque[list[ReferenceType[OffloadedStorage]]] = deque([[]])
        self.num_bytes = 0

    def take(self, length: int, dtype: torch.dtype) -> tuple[torch.Tensor, QueueEvent]:
        """Return a buffer of `length` elements, with whatever it last held, and when it may be written."""
        free = self._free[length, dtype]
        if free:
            return free.popleft()
        self.num_bytes += length * dtype.itemsize
        return self.streams.on_host(length, dtype), OVER

    def give_back(self, buffer: torch.Tensor, read: QueueEvent) -> None:
        """Take a buffer back. read: when the last one that reads it, or writes, is done."""
        self._free[len(buffer), buffer.dtype].append((buffer, read))

    def leaving(self, parcel: "OffloadedStorage") -> None:
        """Take note that a parcel of the current block is on its way."""
        self._leaving[-1].append(ref(parcel))

    def begin(self) -> None:
        """The forward of a block begins: it waits until what all but the last AHEAD - 1 left has gone."""
        while len(self._leaving) >= AHEAD:
            for parcel in filter(None, (reference() for reference in self._leaving.popleft())):
                parcel.leave()
        self._leaving.append([])


class OffloadedStorage:
    """The memory of a tensor, whole, that waits on the host."""

    def __init__(self, tensor: torch.Tensor, host: Host):
        length = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._host = host
        self._back = None
        self._arrived = OVER
        self._buffer, free = host.take(length, tensor.dtype)
        with torch.no_grad():
            whole = tensor.as_strided((length,), (1,), 0)
            host.there.wait(free)
            host.there.wait(host.compute.record())
            host.there.copy(self._buffer, whole)
        self._gone = host.there.record()
        self._leaving = None if self._gone.query() else whole
        if self._leaving is not None:
            host.leaving(self)

    def leave(self) -> None:
        """Free the device's memory, unless it was asked for; what is computed next waits for the copy."""
        if self._leaving is not None:
            self._host.compute.wait(self._gone)
            self._leaving = None

    def fetch(self) -> None:
        """Start copying it back, if that hasn't begun."""
        host, buffer = self._host, self._buffer
        if buffer is None:
            return
        self._buffer = None
        # the copy continues, of what this memory will hold then: nobody reads it
        if self._leaving is not None:
            self._back, self._leaving = self._leaving, None
            host.give_back(buffer, self._gone)
            return
        with torch.no_grad():
            self._back = host.streams.on_device(len(buffer), buffer.dtype)
            host.back.wait(self._gone)
            # the memory was another's, which what is queued may still use
            host.back.wait(host.compute.record())
            host.back.copy(self._back, buffer)
        self._arrived = host.back.record()
        host.give_back(buffer, self._arrived)

    def arrive(self) -> None:
        """Let what is computed next wait until it is there again. Without, it must not be dropped."""
        if self._arrived is not OVER:
            self._host.compute.wait(self._arrived)
            self._arrived = OVER

    def open(self) -> torch.Tensor:
        """Return the memory as one row; what is computed next waits for it."""
        self.fetch()
        self.arrive()
        return self._back


@dataclass(frozen=True, slots=True)
class OffloadedTensor:
    """A tensor whose memory is in a parcel. Its strides stay: kernels may depend on them."""

    parcel: OffloadedStorage
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def open(self) -> torch.Tensor:
        """Return the tensor; what is computed next waits for it."""
        return self.parcel.open().as_strided(self.size, self.stride, self.offset)


@dataclass
class Shelf:
    """What of one microbatch waits in host memory, by block.

    stays: what is in memory anyway, for all microbatches or all blocks, by address.
    block: the one whose forward runs.
    sent: what went, by address, version and type. Neither is held: a block leaves nothing behind.
    """

    host: Host
    stays: dict[int, torch.Tensor] = field(default_factory=dict)
    block: int = 0
    parcels: dict[int, list[OffloadedStorage]] = field(default_factory=dict)
    sent: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, ReferenceType[OffloadedStorage]]] = field(
        default_factory=dict
    )

    def put(self, tensor: torch.Tensor) -> torch.Tensor | OffloadedTensor:
        """Start moving a tensor to the host, unless its memory went with another."""
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.data_ptr() in self.stays or not self.host.streams.has(tensor):
            return tensor
        # what is written meanwhile goes again
        key = storage.data_ptr(), tensor._version, tensor.dtype
        memory, sent = self.sent.get(key, (None, None))
        # expired: the address became another's
        parcel = sent() if memory is not None and not memory.expired() else None
        if parcel is None:
            parcel = OffloadedStorage(tensor.detach(), self.host)
            self.sent[key] = StorageWeakRef(storage), ref(parcel)
            self.parcels.setdefault(self.block, []).append(parcel)
        return OffloadedTensor(parcel, tensor.size(), tensor.stride(), tensor.storage_offset())

    def fetch(self, block: int) -> None:
        """Fetch what a block left whose backward begins; start to fetch what the one before left."""
        here = self.parcels.pop(block, ())
        before = max((number for number in self.parcels if number < block), default=block)
        for parcel in (*here, *self.parcels.get(before, ())):
            parcel.fetch()
        for parcel in here:
            parcel.arrive()


def opened(kept: torch.Tensor | OffloadedTensor) -> torch.Tensor:
    """Return what was kept, from wherever it is."""
    return kept.open() if isinstance(kept, OffloadedTensor) else kept


class Away(NamedTuple):
    """A Keeping (parallel/microbatch.py) that puts things on a shelf."""

    selective: bool
    shelf: Shelf

    def saving(self) -> AbstractContextManager:
        """Put away what autograd saves meanwhile; nobody else computes until this ends."""
        return saved_tensors_hooks(self.shelf.put, opened)

    def put(self, kept: Any) -> Any:
        return _each(kept, torch.Tensor, self.shelf.put)


def restored(kept: Any) -> Any:
    """Return what `put` was given."""
    return _each(kept, OffloadedTensor, opened)


def _each(kept: Any, kind: type, of: Callable[[Any], Any]) -> Any:
    """Return what is kept, tuples within tuples too, with `of` of each thing of a kind."""
    if isinstance(kept, kind):
        return of(kept)
    if not isinstance(kept, tuple):
        return kept
    parts = [_each(part, kind, of) for part in kept]
    return kept._make(parts) if hasattr(kept, "_make") else tuple(parts)


class OffloadStore:
    """What a stage keeps in host memory, by microbatch. constants: tensors that are in memory anyway."""

    def __init__(self, streams: Streams, constants: Sequence[torch.Tensor]):
        self.host = Host(streams)
        self._constants = constants
        self._shelves: dict[int, Shelf] = {}

    def away(self, index: int, block: int, selective: bool, stays: Iterable[torch.Tensor]) -> Away:
        """Return where a block puts what it keeps of a microbatch. stays: what all blocks have."""
        shelf = self._shelves.setdefault(index, Shelf(self.host))
        shelf.stays.update((x.untyped_storage().data_ptr(), x) for x in (*self._constants, *stays))
        shelf.block = block
        self.host.begin()
        return Away(selective, shelf)

    def fetch(self, index: int, block: int) -> None:
        """Start fetching what a block left, and what the one before it left."""
        if index in self._shelves:
            self._shelves[index].fetch(block)

    def forget(self, index: int) -> None:
        """Forget a microbatch."""
        self._shelves.pop(index, None)

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what stays in memory for the microbatches."""
        for shelf in self._shelves.values():
            yield from shelf.stays.values()
