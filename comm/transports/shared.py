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

from collections.abc import Callable

from mpitrain.comm.base.axis_operations import SLOT
from mpitrain.comm.base.buffers import Array, copy, sum_in_order, typed_like
from mpitrain.comm.base.grid import split
from mpitrain.comm.progress import Ready, Steps
from mpitrain.comm.transports import messages
from mpitrain.comm.transports.protocol import TransportAxis
from mpitrain.comm.transports.turnstile import Turnstile
from mpitrain.comm.transports.window import Window

Move = Callable[[int, int], None]  # of a piece, by way of a slot: 0 or 1


def _window(axis: TransportAxis) -> Window:
    """Return the window of an axis: this transport is chosen only where there is one."""
    assert axis.window is not None
    return axis.window


def _through_slots(num_pieces: int, put: Move, take: Move, axis: TransportAxis) -> Steps:
    """Move pieces through the slots.

    put(piece, half) before it is announced, take(piece, half) when everybody's part is there.

    The next piece is put while the others still write this one.
    """
    window = _window(axis)
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


def _in_turn(steps: Steps, axis: TransportAxis) -> Steps:
    """Return steps that wait until the operations called before this one have left the slots.

    Its place is taken now.
    """
    return _pass(axis.turnstile, axis.turnstile.take(), steps)


def _pass(turnstile: Turnstile, my_turn: Ready, steps: Steps) -> Steps:
    yield my_turn
    yield from steps
    turnstile.pass_on()


def _reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    bounds = split(len(x), axis.size)
    slots = _window(axis).slots
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


def _all_gather(out: Array, axis: TransportAxis) -> Steps:
    bounds = split(len(out), axis.size)
    slots = _window(axis).slots
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


def _gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    """Put every rank's part in its slots; only `root` takes them."""
    bounds = split(length, axis.size)
    slots = _window(axis).slots
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
                assert out is not None  # on the root
                target = out[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]
                axis.account.num_bytes += target.nbytes
                copy(place(rank, half, len(target)), target)

    if axis.rank == root:
        assert out is not None
        copy(part, out[bounds[root] : bounds[root + 1]])
    yield from _through_slots(-(-longest // room), put, take, axis)


def _scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    """Put the others' parts in the slots of `root`; each rank takes its own."""
    bounds = split(length, axis.size)
    slot_of = _window(axis).slots[root]
    room = SLOT // axis.size // out.dtype.itemsize  # elements of one rank's part in one slot
    longest = max(end - begin for begin, end in zip(bounds, bounds[1:]))

    def place(rank: int, half: int, num_elements: int) -> Array:
        memory = slot_of[half][rank * room * out.dtype.itemsize :]
        return typed_like(out, memory[: num_elements * out.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        for rank in range(axis.size) if axis.rank == root else ():
            if rank != root:
                assert x is not None  # on the root
                source = x[bounds[rank] : bounds[rank + 1]][piece * room : (piece + 1) * room]
                copy(source, place(rank, half, len(source)))

    def take(piece: int, half: int) -> None:
        if axis.rank != root:
            target = out[piece * room : (piece + 1) * room]
            axis.account.num_bytes += target.nbytes
            copy(place(axis.rank, half, len(target)), target)

    if axis.rank == root:
        assert x is not None
        copy(x[bounds[root] : bounds[root + 1]], out)
    yield from _through_slots(-(-longest // room), put, take, axis)


def _broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    room = SLOT // x.dtype.itemsize

    def place(piece: int, half: int) -> tuple[Array, Array]:
        part = x[piece * room : (piece + 1) * room]
        return part, typed_like(x, _window(axis).slots[root][half][: len(part) * x.dtype.itemsize])

    def put(piece: int, half: int) -> None:
        if axis.rank == root:
            copy(*place(piece, half))

    def take(piece: int, half: int) -> None:
        if axis.rank != root:
            target, source = place(piece, half)
            axis.account.num_bytes += target.nbytes
            copy(source, target)

    yield from _through_slots(-(-len(x) // room), put, take, axis)


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`, adding straight from the
    others' memory.
    """
    return _in_turn(_reduce_scatter_steps(x, out, axis), axis)


def _reduce_scatter_steps(x: Array, out: Array, axis: TransportAxis) -> Steps:
    views = axis.views(x)
    if views is None:
        yield from _reduce_scatter(x, out, axis)
        return
    yield from _window(axis).handshake()
    _sum_shard(views, out, axis)
    yield from _window(axis).handshake()  # now nobody reads `x` any more


def all_gather(out: Array, axis: TransportAxis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    return _in_turn(_all_gather_steps(out, axis), axis)


def _all_gather_steps(out: Array, axis: TransportAxis) -> Steps:
    views = axis.views(out)
    if views is None:
        yield from _all_gather(out, axis)
        return
    yield from _window(axis).handshake()
    _fetch_shards(views, out, axis)
    yield from _window(axis).handshake()


def all_reduce(x: Array, axis: TransportAxis) -> Steps:
    """Sum `x` in place over the axis: reduce-scatter and all-gather."""
    return _in_turn(_all_reduce_steps(x, axis), axis)


def _all_reduce_steps(x: Array, axis: TransportAxis) -> Steps:
    bounds = split(len(x), axis.size)
    views = axis.views(x)
    own = x[bounds[axis.rank] : bounds[axis.rank + 1]]
    if views is None:
        yield from _reduce_scatter(x, own, axis)
        yield from _all_gather(x, axis)
        return
    yield from _window(axis).handshake()
    _sum_shard(views, own, axis)
    yield from _window(axis).handshake()
    _fetch_shards(views, x, axis)
    yield from _window(axis).handshake()


def _sum_shard(views: list[Array], out: Array, axis: TransportAxis) -> None:
    begin, end = split(len(views[0]), axis.size)[axis.rank : axis.rank + 2]
    axis.account.num_bytes += out.nbytes * (axis.size - 1)
    sum_in_order([view[begin:end] for view in views], out)


def _fetch_shards(views: list[Array], out: Array, axis: TransportAxis) -> None:
    bounds = split(len(out), axis.size)
    for rank, view in enumerate(views):
        if rank != axis.rank:
            part = out[bounds[rank] : bounds[rank + 1]]
            axis.account.num_bytes += part.nbytes
            copy(view[bounds[rank] : bounds[rank + 1]], part)


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others through the slots of `root`."""
    return _in_turn(_broadcast(x, root, axis), axis)


def reduce(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    """Write the sum of `x` over the axis to `out` of `root`.

    Each rank adds up its shard, and `root` collects them.
    """
    return _in_turn(_reduce_steps(x, out, root, axis), axis)


def _reduce_steps(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    part, memory = messages.part_for(x, out, axis)
    yield from _reduce_scatter_steps(x, part, axis)
    yield from _gather(part, out, len(x), root, axis)
    axis.scratch.give_back(memory)


def gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    """Collect every rank's part of `length` elements in `out` of `root`."""
    return _in_turn(_gather(part, out, length, root, axis), axis)


def scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    """Send every rank its part of the `length` elements in `x` of `root`."""
    return _in_turn(_scatter(x, out, length, root, axis), axis)


# counts that differ from pair to pair: no rank knows how many pieces there are in all
exchange = messages.exchange
# slots move on only when every rank polls; a message of a ring travels while all compute
shift = messages.shift
