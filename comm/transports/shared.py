"""Transport `shared`: the ranks of one node read one another's buffers in an MPI shared-memory window.

Buffers that an axis allocated (gradient buckets) lie in a window as a whole: after a handshake
everyone adds straight from the others' memory. Any other buffer goes through slots, piece by piece,
each piece small enough to stay in the cache. Each rank owns a segment with two counters and two
slots:

    header  written: pieces this rank has put in its slots       read: pieces this rank has taken
                                                                 from everybody's slots
    slot 0  piece 0, 2, 4 ...
    slot 1  piece 1, 3, 5 ...     overwritten only when every rank has read the piece before it in
                                  that slot

The counters order the data: Win.Sync() fences the stores before a counter is raised and the loads
after it was seen (MPI-4.1, 12.7.1). Operations use the slots and counters one after another, in the
order in which they were started. Nothing is sent; what a rank reads from the others' memory is
counted instead.
"""

import math
import os
from collections.abc import Sequence
from functools import wraps

import numpy as np

from mpitrain.comm.base.axis_operations import HEADER, SLOT, WINDOW
from mpitrain.comm.base.buffers import Array, address, copy, sum_in_order, typed_like
from mpitrain.comm.base.grid import split
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.progress import Ready, Steps
from mpitrain.comm.transports import messages
from mpitrain.comm.transports.mpi_collectives import Turnstile

UNKNOWN = 64 << 20  # bytes that a rank takes where nobody says how much there is
FOLDER = "/dev/shm"  # where MPI libraries keep shared memory on Linux


class Budget:
    """What a rank may take of the shared memory of its node: its part of half of what is free now.

    Construction is collective over `node`.

    A page is taken when it is first written to, and where none is left that is no error but SIGBUS.
    So what windows and buffers can come to is counted before; the other half is for what MPI makes
    in the same way, and for other jobs.
    """

    def __init__(self, node: MPI.Comm):
        self.free = node.allreduce(free(), MPI.MIN)
        self.left = UNKNOWN if self.free == math.inf else self.free // (2 * node.size)
        self.refused = dict[str, int]()  # bytes of a rank, by the name of the axis

    def take(self, name: str, num_bytes: int, comm: MPI.Comm) -> bool:
        """Take so much, if each rank of axis `name` has it left; return whether.

        Collective over `comm`, the axis's.
        """
        granted = comm.allreduce(num_bytes <= self.left, MPI.LAND)
        if granted:
            self.left -= num_bytes
        else:
            self.refused[name] = self.refused.get(name, 0) + num_bytes
        return granted

    def describe(self) -> str:
        """Say what there was too little for; "" if for nothing."""
        if not self.refused:
            return ""
        axes = ", ".join(
            f"{name} ({num_bytes / 1e6:,.1f} MB a rank)" for name, num_bytes in self.refused.items()
        )
        return (
            f"{self.free / 1e6:,.0f} MB of shared memory are free in {FOLDER} of {os.uname().nodename}, of "
            f"which half is MPI's: too little for axes {axes}, which send copies instead: slower, with the "
            "same bits; make it larger (docker run --shm-size=8g)"
        )


def free() -> float:
    """Return how many bytes of shared memory this node has; infinitely many where nobody says."""
    try:
        room = os.statvfs(FOLDER)
    except OSError:
        return math.inf
    return room.f_bavail * room.f_frsize


class Window:
    """The shared memory of one axis.

    Construction and free() are collective over `comm`, whose ranks share a node.
    ranks: of the world.
    """

    def __init__(self, comm: MPI.Comm, ranks: Sequence[int]):
        self.size = comm.size
        self.rank = comm.rank
        self._ranks = ranks
        self._window = MPI.Win.Allocate_shared(WINDOW, 1, comm=comm)
        segments = [np.frombuffer(self._window.Shared_query(r)[0], np.uint8) for r in range(comm.size)]
        self.slots = [[s[HEADER + half * SLOT :][:SLOT] for half in (0, 1)] for s in segments]
        self._written = [s[:8].view(np.int64) for s in segments]
        self._read = [s[64:72].view(np.int64) for s in segments]
        self._written[self.rank][0] = self._read[self.rank][0] = 0
        self._window.Lock_all(MPI.MODE_NOCHECK)
        self.piece = 0  # number of the next piece; every rank counts alike
        self._window.Sync()
        comm.Barrier()

    def free(self) -> None:
        """Give the memory back. Collective."""
        self.slots = self._written = self._read = []
        self._window.Unlock_all()
        self._window.Free()

    def publish(self, piece: int) -> None:
        """Announce that the own part of `piece` is in its slot."""
        self._raise(self._written[self.rank], piece + 1)

    def release(self, piece: int) -> None:
        """Announce that this rank has read everybody's part of `piece`."""
        self._raise(self._read[self.rank], piece + 1)

    def written(self, piece: int) -> Ready:
        """Return whether everybody's part of `piece` is there to be read."""
        return self._reached(self._written, piece + 1)

    def writable(self, piece: int) -> Ready:
        """Return whether the slot of `piece` is free: everybody has read the piece before it in that slot."""
        return self._reached(self._read, piece - 1)

    def handshake(self) -> Steps:
        """Wait until every rank has come here; what was written before is then visible to all."""
        piece = self.piece
        self.piece = self.piece + 1
        self.publish(piece)
        yield self.written(piece)
        self.release(piece)

    def _raise(self, counter: np.ndarray, value: int) -> None:
        self._window.Sync()
        counter[0] = value
        self._window.Sync()

    def _reached(self, counters: list[np.ndarray], value: int) -> Ready:
        return _Reached(self._window, counters, value, self._ranks)


class _Reached:
    """Whether the counters of all ranks have reached a value."""

    def __init__(self, window: MPI.Win, counters: list[np.ndarray], value: int, ranks: Sequence[int]):
        self._window = window
        self._counters = counters
        self._value = value
        self._ranks = ranks

    def __call__(self) -> bool:
        if any(counter[0] < self._value for counter in self._counters):
            return False
        self._window.Sync()
        return True

    def waiting_on(self) -> set[int]:
        """Return the ranks whose counters haven't."""
        return {rank for rank, counter in zip(self._ranks, self._counters) if counter[0] < self._value}


class Allocation:
    """A buffer of `num_bytes` per rank that all ranks of `comm` can read.

    Construction and free() are collective.
    """

    def __init__(self, comm: MPI.Comm, num_bytes: int):
        room = -(-num_bytes // HEADER) * HEADER  # whole pages: every rank's buffer begins on one
        self._window = MPI.Win.Allocate_shared(room, 1, comm=comm)
        self.segments = [
            np.frombuffer(self._window.Shared_query(r)[0], np.uint8)[:num_bytes] for r in range(comm.size)
        ]
        self.memory = self.segments[comm.rank]

    def clear(self) -> bool:
        """Write zeros; return whether there was a page for each: others take shared memory, too.

        The kernel says so, a store is SIGBUS.
        """
        begin = 0
        with open("/dev/zero", "rb", buffering=0) as zeros:
            while begin < len(self.memory):
                try:
                    begin += zeros.readinto(self.memory[begin:])
                except OSError:
                    return False
        return True

    def holds(self, x: Array) -> bool:
        """Tell whether `x` lies in this rank's buffer."""
        return 0 <= address(x) - self.memory.ctypes.data <= len(self.memory) - x.nbytes

    def views(self, x: Array) -> list[Array]:
        """Return what every rank has at the place of `x`."""
        begin = address(x) - self.memory.ctypes.data
        return [typed_like(x, segment[begin : begin + x.nbytes]) for segment in self.segments]

    def free(self) -> None:
        """Give the memory back; nobody may use a view of it any more."""
        self.segments = []
        self.memory = None
        self._window.Free()


def _through_slots(num_pieces: int, put, take, axis) -> Steps:
    """Move pieces through the slots.

    put(piece, half) before it is announced, take(piece, half) when everybody's part is there.

    The next piece is put while the others still write this one.
    """
    window = axis.window
    first = window.piece
    window.piece += num_pieces
    for i in range(num_pieces + 1):
        if i < num_pieces:
            yield window.writable(first + i)
            put(i, (first + i) % 2)
            window.publish(first + i)
        if i:
            yield window.written(first + i - 1)
            take(i - 1, (first + i - 1) % 2)
            window.release(first + i - 1)


def _in_turn(steps) -> Steps:
    """Decorate an operation: called now, its steps wait until the operations called before it have
    left the slots.
    """

    @wraps(steps)
    def operation(*arguments) -> Steps:
        turnstile = arguments[-1].turnstile
        return _pass(turnstile, turnstile.take(), steps(*arguments))

    return operation


def _pass(turnstile: Turnstile, my_turn: Ready, steps: Steps) -> Steps:
    yield my_turn
    yield from steps
    turnstile.pass_on()


def _reduce_scatter(x: Array, out: Array, axis) -> Steps:
    bounds = split(len(x), axis.size)
    slots = axis.window.slots
    size = axis.size
    me = axis.rank
    room = SLOT // size // x.dtype.itemsize  # elements of one rank's shard in one slot
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))

    def shard(rank: int, piece: int) -> Array:
        return x[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]

    def place(writer: int, half: int, rank: int, length: int) -> Array:
        memory = slots[writer][half][rank * room * x.dtype.itemsize :]
        return typed_like(x, memory[: length * x.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        for rank in range(size):
            if rank != me:
                copy(shard(rank, piece), place(me, half, rank, len(shard(rank, piece))))

    def take(piece: int, half: int) -> None:
        own = shard(me, piece)
        parts = [own if rank == me else place(rank, half, me, len(own)) for rank in range(size)]
        axis.account.num_bytes += own.nbytes * (size - 1)
        sum_in_order(parts, out[piece * room : (piece + 1) * room])

    yield from _through_slots(-(-longest // room), put, take, axis)


def _all_gather(out: Array, axis) -> Steps:
    bounds = split(len(out), axis.size)
    slots = axis.window.slots
    room = SLOT // out.dtype.itemsize
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))

    def part(rank: int, piece: int) -> Array:
        return out[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]

    def place(rank: int, half: int, like: Array) -> Array:
        return typed_like(out, slots[rank][half][: len(like) * out.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        copy(part(axis.rank, piece), place(axis.rank, half, part(axis.rank, piece)))

    def take(piece: int, half: int) -> None:
        for rank in range(axis.size):
            if rank != axis.rank:
                target = part(rank, piece)
                axis.account.num_bytes += target.nbytes
                copy(place(rank, half, target), target)

    yield from _through_slots(-(-longest // room), put, take, axis)


def _gather(part: Array, out: Array | None, length: int, root: int, axis) -> Steps:
    """Put every rank's part in its slots; only `root` takes them."""
    bounds = split(length, axis.size)
    slots = axis.window.slots
    room = SLOT // part.dtype.itemsize
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))

    def place(rank: int, half: int, num_elements: int) -> Array:
        return typed_like(part, slots[rank][half][: num_elements * part.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        if axis.rank != root:
            mine = part[piece * room : (piece + 1) * room]
            copy(mine, place(axis.rank, half, len(mine)))

    def take(piece: int, half: int) -> None:
        for rank in range(axis.size) if axis.rank == root else ():
            if rank != root:
                target = out[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]
                axis.account.num_bytes += target.nbytes
                copy(place(rank, half, len(target)), target)

    if axis.rank == root:
        copy(part, out[bounds[root] : bounds[root + 1]])
    yield from _through_slots(-(-longest // room), put, take, axis)


def _scatter(x: Array | None, out: Array, length: int, root: int, axis) -> Steps:
    """Put the others' parts in the slots of `root`; each rank takes its own."""
    bounds = split(length, axis.size)
    slot_of = axis.window.slots[root]
    room = SLOT // axis.size // out.dtype.itemsize  # elements of one rank's part in one slot
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))

    def place(rank: int, half: int, num_elements: int) -> Array:
        memory = slot_of[half][rank * room * out.dtype.itemsize :]
        return typed_like(out, memory[: num_elements * out.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        for rank in range(axis.size) if axis.rank == root else ():
            if rank != root:
                source = x[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]
                copy(source, place(rank, half, len(source)))

    def take(piece: int, half: int) -> None:
        if axis.rank != root:
            target = out[piece * room : (piece + 1) * room]
            axis.account.num_bytes += target.nbytes
            copy(place(axis.rank, half, len(target)), target)

    if axis.rank == root:
        copy(x[bounds[root] : bounds[root + 1]], out)
    yield from _through_slots(-(-longest // room), put, take, axis)


def _broadcast(x: Array, root: int, axis) -> Steps:
    room = SLOT // x.dtype.itemsize

    def place(piece: int, half: int) -> tuple[Array, Array]:
        part = x[piece * room : (piece + 1) * room]
        return part, typed_like(x, axis.window.slots[root][half][: len(part) * x.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        if axis.rank == root:
            copy(*place(piece, half))

    def take(piece: int, half: int) -> None:
        if axis.rank != root:
            target, source = place(piece, half)
            axis.account.num_bytes += target.nbytes
            copy(source, target)

    yield from _through_slots(-(-len(x) // room), put, take, axis)


@_in_turn
def reduce_scatter(x: Array, out: Array, axis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`, adding straight from the
    others' memory.
    """
    views = axis.views(x)
    if views is None:
        yield from _reduce_scatter(x, out, axis)
        return
    yield from axis.window.handshake()
    _sum_shard(views, out, axis)
    yield from axis.window.handshake()  # now nobody reads `x` any more


@_in_turn
def all_gather(out: Array, axis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    views = axis.views(out)
    if views is None:
        yield from _all_gather(out, axis)
        return
    yield from axis.window.handshake()
    _fetch_shards(views, out, axis)
    yield from axis.window.handshake()


@_in_turn
def all_reduce(x: Array, axis) -> Steps:
    """Sum `x` in place over the axis: reduce-scatter and all-gather."""
    bounds = split(len(x), axis.size)
    views = axis.views(x)
    own = x[bounds[axis.rank] : bounds[axis.rank + 1]]
    if views is None:
        yield from _reduce_scatter(x, own, axis)
        yield from _all_gather(x, axis)
        return
    yield from axis.window.handshake()
    _sum_shard(views, own, axis)
    yield from axis.window.handshake()
    _fetch_shards(views, x, axis)
    yield from axis.window.handshake()


def _sum_shard(views: list[Array], out: Array, axis) -> None:
    begin, end = split(len(views[0]), axis.size)[axis.rank : axis.rank + 2]
    axis.account.num_bytes += out.nbytes * (axis.size - 1)
    sum_in_order([view[begin:end] for view in views], out)


def _fetch_shards(views: list[Array], out: Array, axis) -> None:
    bounds = split(len(out), axis.size)
    for rank, view in enumerate(views):
        if rank != axis.rank:
            part = out[bounds[rank] : bounds[rank + 1]]
            axis.account.num_bytes += part.nbytes
            copy(view[bounds[rank] : bounds[rank + 1]], part)


@_in_turn
def broadcast(x: Array, root: int, axis) -> Steps:
    """Send the `x` of `root` to all others through the slots of `root`."""
    yield from _broadcast(x, root, axis)


@_in_turn
def reduce(x: Array, out: Array | None, root: int, axis) -> Steps:
    """Write the sum of `x` over the axis to `out` of `root`.

    Each rank adds up its shard, and `root` collects them.
    """
    views = axis.views(x)
    part, memory = messages.part_for(x, out, axis)
    if views is None:
        yield from _reduce_scatter(x, part, axis)
    else:
        yield from axis.window.handshake()
        _sum_shard(views, part, axis)
        yield from axis.window.handshake()  # now nobody reads `x` any more
    yield from _gather(part, out, len(x), root, axis)
    axis.scratch.give_back(memory)


@_in_turn
def gather(part: Array, out: Array | None, length: int, root: int, axis) -> Steps:
    """Collect every rank's part of `length` elements in `out` of `root`."""
    yield from _gather(part, out, length, root, axis)


@_in_turn
def scatter(x: Array | None, out: Array, length: int, root: int, axis) -> Steps:
    """Send every rank its part of the `length` elements in `x` of `root`."""
    yield from _scatter(x, out, length, root, axis)


# counts that differ from pair to pair: no rank knows how many pieces there are in all
exchange = messages.exchange
# slots move on only when every rank polls; a message of a ring travels while all compute
shift = messages.shift
