"""Transport `shared`: the ranks of one node read one another's buffers in an MPI shared-memory window.

Buffers that an axis allocated (gradient buckets) lie in a window: after a handshake everyone adds
straight from the others' memory. Others go through slots, in pieces that stay in the cache. Each
rank owns a segment with two counters and two slots:

    header  written: pieces this rank has put in its slots       read: pieces this rank has taken
                                                                 from everybody's slots
    slot 0  piece 0, 2, 4 ...
    slot 1  piece 1, 3, 5 ...     overwritten only when every rank has read the piece before it in
                                  that slot

The counters order the data: Win.Sync() fences the stores before a counter is raised and the loads
after it was seen (MPI-4.1, 12.7.1). Operations use them one after another, in the order in which
they were started. What a rank reads from the others' memory is counted instead of what is sent.
"""

from collections.abc import Callable, Mapping, Sequence

from mpitrain.comm.base.axis_operations import SLOT
from mpitrain.comm.base.buffers import Array, copy, sum_in_order, typed_like
from mpitrain.comm.base.grid import split
from mpitrain.comm.progress import Ready, Steps
from mpitrain.comm.transports import messages
from mpitrain.comm.transports.protocol import TransportAxis
from mpitrain.comm.transports.turnstile import Turnstile
from mpitrain.comm.transports.window import Window

# a rank, a region of its slots, and the buffer that is for what it puts there
Taken = tuple[int, int, Array]


def _window(axis: TransportAxis) -> Window:
    assert axis.window is not None
    return axis.window


def _through_slots(
    axis: TransportAxis,
    like: Array,
    longest: int,
    puts: Mapping[int, Array],
    takes: Sequence[Taken],
    *,
    regions: int = 1,
    use: Callable[[list[Array], slice], None] | None = None,
) -> Steps:
    """Move buffers, each of at most `longest` elements like those of `like`, through the slots.

    Piece by piece: the next one is put while the others still write this one.
    regions: equal ones, that a slot is divided into.  puts: what this rank puts, by region.
    use: is given what `takes` has, and which elements these are; default: copies to its buffers.
    """
    window = _window(axis)
    itemsize = like.dtype.itemsize
    room = SLOT // regions // itemsize
    num_pieces = -(-longest // room)
    first = window.piece
    window.piece += num_pieces

    def place(rank: int, region: int, half: int, part: Array) -> Array:
        memory = window.slots[rank][half][region * room * itemsize :]
        return typed_like(like, memory[: len(part) * itemsize])

    for i in range(num_pieces + 1):
        if i < num_pieces:
            yield window.writable(first + i)
            for region, x in puts.items():
                part = x[i * room : (i + 1) * room]
                copy(part, place(axis.rank, region, (first + i) % 2, part))
            window.publish(first + i)
        if i:
            yield window.written(first + i - 1)
            at = slice((i - 1) * room, i * room)
            parts = [x[at] for _, _, x in takes]
            places = [
                place(rank, region, (first + i - 1) % 2, part)
                for (rank, region, _), part in zip(takes, parts)
            ]
            axis.account.num_bytes += sum(part.nbytes for part in parts)
            if use is not None:
                use(places, at)
            else:
                for source, part in zip(places, parts):
                    copy(source, part)
            window.release(first + i - 1)


def _in_turn(steps: Steps, axis: TransportAxis) -> Steps:
    """Take a place now; return steps that wait until operations before have left the slots."""
    return _pass(axis.turnstile, axis.turnstile.take(), steps)


def _pass(turnstile: Turnstile, my_turn: Ready, steps: Steps) -> Steps:
    yield my_turn
    yield from steps
    turnstile.pass_on()


def _reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    shards = messages.shards_of(x, axis)
    me = axis.rank
    others = _of_others(shards, axis)

    def add(parts: list[Array], at: slice) -> None:
        sum_in_order([*parts[:me], shards[me][at], *parts[me:]], out[at])

    takes = [(rank, me, shards[me]) for rank in others]
    longest = _longest(len(x), axis)
    return _through_slots(axis, x, longest, others, takes, regions=axis.size, use=add)


def _of_others(shards: Sequence[Array], axis: TransportAxis) -> dict[int, Array]:
    return {rank: shard for rank, shard in enumerate(shards) if rank != axis.rank}


def _longest(length: int, axis: TransportAxis) -> int:
    return -(-length // axis.size)


def _all_gather(out: Array, axis: TransportAxis) -> Steps:
    shards = messages.shards_of(out, axis)
    takes = [(rank, 0, shard) for rank, shard in _of_others(shards, axis).items()]
    return _through_slots(axis, out, _longest(len(out), axis), {0: shards[axis.rank]}, takes)


def _gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    puts, takes = {0: part}, list[Taken]()
    if axis.rank == root:
        assert out is not None
        shards = messages.shards_of(out, axis)
        copy(part, shards[root])
        puts, takes = {}, [(rank, 0, shard) for rank, shard in _of_others(shards, axis).items()]
    yield from _through_slots(axis, part, _longest(length, axis), puts, takes)


def _scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    puts, takes = dict[int, Array](), [(root, axis.rank, out)]
    if axis.rank == root:
        assert x is not None
        shards = messages.shards_of(x, axis)
        copy(shards[root], out)
        puts, takes = _of_others(shards, axis), []
    yield from _through_slots(axis, out, _longest(length, axis), puts, takes, regions=axis.size)


def _broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    if axis.rank == root:
        return _through_slots(axis, x, len(x), {0: x}, [])
    return _through_slots(axis, x, len(x), {}, [(root, 0, x)])


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum of the own shard of `x` to `out`, adding straight from the others' memory."""
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
    views = axis.views(x)
    own = messages.own_shard(x, axis)
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
    axis.account.num_bytes += out.nbytes * (axis.size - 1)
    sum_in_order([messages.own_shard(view, axis) for view in views], out)


def _fetch_shards(views: list[Array], out: Array, axis: TransportAxis) -> None:
    bounds = split(len(out), axis.size)
    for rank, view in enumerate(views):
        if rank != axis.rank:
            part = slice(*bounds[rank : rank + 2])
            axis.account.num_bytes += out[part].nbytes
            copy(view[part], out[part])


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others through the slots of `root`."""
    return _in_turn(_broadcast(x, root, axis), axis)


def reduce(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    """Write the sum of `x` to `out` of `root`, which collects what each rank has added up."""
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
