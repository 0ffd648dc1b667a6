"""What a forward keeps for its backward, and where: `memory.recompute = "selective"` and `memory.offload`.

Tensors that wait in host memory are sent there as they are kept. When the backward begins with a block, the block before it is fetched:

    forward     block 0       block 1       block 2
                        out 0         out 1         out 2              on a stream of their own
    backward    block 2       block 1       block 0
                in 1          in 0

On a CPU a copy in host memory saves nothing and costs a copy each way; it is there so that every machine can test it.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef


class Host:
    """Host memory for tensors of `device`, in buffers that are used again. `stream`: on which a GPU copies, so always in order."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = defaultdict(list)
        self.num_bytes = 0

    def take(self, length: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a buffer of `length` elements, with whatever it last held."""
        free = self._free[length, dtype]
        if free:
            return free.pop()
        self.num_bytes += length * dtype.itemsize
        return torch.empty(length, dtype=dtype, pin_memory=self.stream is not None)

    def give_back(self, buffer: torch.Tensor) -> None:
        """Take a buffer back; what still reads it comes first on the stream."""
        self._free[len(buffer), buffer.dtype].append(buffer)


class Parcel:
    """The memory of a tensor, whole, that waits on the host."""

    def __init__(self, tensor: torch.Tensor, host: Host):
        length = tensor.untyped_storage().nbytes() // tensor.itemsize
        self._host, self._device = host, tensor.device
        self._buffer: torch.Tensor | None = host.take(length, tensor.dtype)
        self._back: torch.Tensor | None = None
        if host.stream is not None:
            host.stream.wait_stream(torch.cuda.current_stream(self._device))
            tensor.record_stream(host.stream)
        with torch.no_grad(), self._on_stream():
            self._buffer.copy_(tensor.as_strided((length,), (1,), 0), non_blocking=True)

    def fetch(self) -> None:
        """Start copying it back, if that hasn't begun."""
        if self._buffer is None:
            return
        with torch.no_grad(), self._on_stream():
            self._back = torch.empty_like(self._buffer, device=self._device)
            self._back.copy_(self._buffer, non_blocking=True)
        self._host.give_back(self._buffer)
        self._arrived = self._host.stream.record_event() if self._host.stream is not None else None
        self._buffer = None

    def open(self) -> torch.Tensor:
        """Return the memory as one row; what is computed next waits for it."""
        self.fetch()
        if self._arrived is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(self._arrived)
            self._back.record_stream(current)
        return self._back

    def _on_stream(self) -> Any:
        return nullcontext() if self._host.stream is None else torch.cuda.stream(self._host.stream)


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor whose memory is in a parcel. It comes back with the strides it had, for kernels may depend on them."""

    parcel: Parcel
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def open(self) -> torch.Tensor:
        """Return the tensor; what is computed next waits for it."""
        return self.parcel.open().as_strided(self.size, self.stride, self.offset)


@dataclass
class Shelf:
    """What of one microbatch waits in host memory, by block.

    stays: what is in memory anyway, for all microbatches or all blocks, by address.  block: the one whose forward runs.
    sent: what went, by address, version and type. It holds neither: a block that is done leaves nothing behind.
    """

    host: Host
    stays: dict[int, torch.Tensor] = field(default_factory=dict)
    block: int = 0
    parcels: dict[int, list[Parcel]] = field(default_factory=dict)
    sent: dict[tuple[int, int, torch.dtype], tuple[StorageWeakRef, ReferenceType[Parcel]]] = field(default_factory=dict)

    def put(self, tensor: torch.Tensor) -> torch.Tensor | Part:
        """Start moving a tensor to the host, unless its memory went with another."""
        storage = tensor.untyped_storage()
        if not tensor.numel() or storage.data_ptr() in self.stays:
            return tensor
        key = storage.data_ptr(), tensor._version, tensor.dtype  # what is written meanwhile goes again
        memory, sent = self.sent.get(key, (None, None))
        parcel = sent() if memory is not None and not memory.expired() else None  # expired: the address became another's
        if parcel is None:
            parcel = Parcel(tensor.detach(), self.host)
            self.sent[key] = StorageWeakRef(storage), ref(parcel)
            self.parcels.setdefault(self.block, []).append(parcel)
        return Part(parcel, tensor.size(), tensor.stride(), tensor.storage_offset())

    def fetch(self, block: int) -> None:
        """Start fetching what a block left, and what the one before it left."""
        before = max((number for number in self.parcels if number < block), default=block)
        for parcel in (*self.parcels.pop(block, ()), *self.parcels.get(before, ())):
            parcel.fetch()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Put away what autograd saves meanwhile; nobody else computes until this ends."""
        with saved_tensors_hooks(self.put, opened):
            yield


def opened(kept: torch.Tensor | Part) -> torch.Tensor:
    """Return what was kept, from wherever it is."""
    return kept.open() if isinstance(kept, Part) else kept


class Away(NamedTuple):
    """A Keeping (parallel/microbatch.py) that puts things on a shelf."""

    selective: bool
    shelf: Shelf

    def saving(self) -> AbstractContextManager:
        return self.shelf.saving()

    def put(self, kept: Any) -> Any:
        if kept is None:
            return kept
        if isinstance(kept, torch.Tensor):
            return self.shelf.put(kept)
        return kept._make(self.shelf.put(each) if isinstance(each, torch.Tensor) else each for each in kept)


def restored(kept: Any) -> Any:
    """Return what `put` was given."""
    return kept._make(map(opened, kept)) if isinstance(kept, tuple) else opened(kept)


class Shelves:
    """What a stage keeps in host memory, by microbatch. constants: tensors that are in memory anyway."""

    def __init__(self, device: torch.device, constants: Sequence[torch.Tensor]):
        self.host, self._constants = Host(device), constants
        self._shelves: dict[int, Shelf] = {}

    def away(self, index: int, block: int, selective: bool, stays: Iterable[torch.Tensor]) -> Away:
        """Return where a block puts what it keeps of a microbatch. stays: of the microbatch, what all blocks have."""
        shelf = self._shelves.setdefault(index, Shelf(self.host))
        shelf.stays.update((x.untyped_storage().data_ptr(), x) for x in (*self._constants, *stays))
        shelf.block = block
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
