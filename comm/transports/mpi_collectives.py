"""Transport `collectives`: MPI's own non-blocking collectives move bytes of host buffers; we add.

MPI matches the collectives of one communicator by their order. But a first phase is posted when its
data is there, and the second phase of an all-reduce when the first is complete: both differ from
rank to rank. So both have a communicator and a turnstile of their own, which they pass in the order
in which their operations were started.

Counted as sent is what the others get from this rank: MPI chooses the way.
"""

from collections.abc import Callable
from itertools import chain

from mpitrain.comm.base.buffers import Array, raw
from mpitrain.comm.base.grid import split
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.progress import Arrived, Posted, Steps
from mpitrain.comm.transports import messages
from mpitrain.comm.transports.protocol import TransportAxis
from mpitrain.comm.transports.turnstile import Turnstile
from mpitrain.errors import DtypeError

LIMIT = (1 << 31) - 1  # bytes an operation can address: displacements are C ints
WIDEST = 16  # bytes of an element, a long double


def addresses(num_bytes: int, size: int) -> bool:
    """Return whether a buffer can be reduced: shards are received with an element more."""
    return num_bytes + size * WIDEST <= LIMIT


def exchange(x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis) -> Steps:
    """Send x[sent[r]:sent[r+1]] to every other rank r; receive its counterpart into `out`."""
    source = _blocks(x, sent, axis.rank)
    target = _blocks(out, received, axis.rank)
    return _in_turn(axis.turnstile, lambda: axis.comm.Ialltoallv(source, target), sum(source[1]), axis)


def shift(x: Array, out: Array, distance: int, axis: TransportAxis) -> Steps:
    """Send `x` to the rank `distance` further along the axis: an exchange in which one part is everything."""
    target = (axis.rank + distance) % axis.size
    source = (axis.rank - distance) % axis.size
    sent, received = ([0] * (r + 1) + [len(x)] * (axis.size - r) for r in (target, source))
    return exchange(x, sent, out, received, axis)


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`: exchange shards, then add them."""
    return messages.exchange_and_sum(exchange, x, out, axis)


def all_gather(out: Array, axis: TransportAxis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    return _all_gather(out, axis, axis.comm, axis.turnstile)


def all_reduce(x: Array, axis: TransportAxis) -> Steps:
    """Sum `x` in place over the axis: reduce-scatter and all-gather."""
    return chain(
        reduce_scatter(x, messages.own_shard(x, axis), axis),
        _all_gather(x, axis, axis.second, axis.second_turnstile),
    )


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others."""
    others = (axis.size - 1) * (axis.rank == root)
    return _in_turn(
        axis.turnstile, lambda: axis.comm.Ibcast([raw(x), MPI.BYTE], root), x.nbytes * others, axis, others
    )


def reduce(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    """Write the sum of `x` over the axis to `out` of `root`: reduce-scatter and gather."""
    part, memory = messages.part_for(x, out, axis)
    gathered = _gather(part, out, root, axis, axis.second, axis.second_turnstile)
    return chain(reduce_scatter(x, part, axis), gathered, messages.given_back(memory, axis))


def gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    """Collect every rank's part in `out` of `root`."""
    return _gather(part, out, root, axis, axis.comm, axis.turnstile)


def scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    """Send every rank its part of the `x` of `root`."""
    if axis.rank != root:
        return _in_turn(
            axis.turnstile, lambda: axis.comm.Iscatterv(None, [raw(out), MPI.BYTE], root), 0, axis, 0
        )
    assert x is not None  # on the root
    blocks = _blocks(x, split(len(x), axis.size))
    own = messages.own_shard(x, axis)
    sent = x.nbytes - own.nbytes
    post = lambda: axis.comm.Iscatterv(blocks, MPI.IN_PLACE, root)  # noqa: E731
    return messages.copied(own, out, _in_turn(axis.turnstile, post, sent, axis))


def _gather(
    part: Array, out: Array | None, root: int, axis: TransportAxis, comm: MPI.Comm, turnstile: Turnstile
) -> Steps:
    if axis.rank != root:
        return _in_turn(
            turnstile, lambda: comm.Igatherv([raw(part), MPI.BYTE], None, root), part.nbytes, axis, 1
        )
    assert out is not None  # on the root
    blocks = _blocks(out, split(len(out), axis.size))
    steps = _in_turn(turnstile, lambda: comm.Igatherv(MPI.IN_PLACE, blocks, root), 0, axis, 0)
    return messages.copied(part, messages.own_shard(out, axis), steps)


def _all_gather(out: Array, axis: TransportAxis, comm: MPI.Comm, turnstile: Turnstile) -> Steps:
    blocks = _blocks(out, split(len(out), axis.size))
    return _in_turn(
        turnstile,
        lambda: comm.Iallgatherv(MPI.IN_PLACE, blocks),
        blocks[1][axis.rank] * (axis.size - 1),
        axis,
    )


def _in_turn(
    turnstile: Turnstile,
    post: Callable[[], MPI.Request],
    num_bytes: int,
    axis: TransportAxis,
    num_messages: int | None = None,
) -> Steps:
    """Post a collective, which sends `num_bytes`, after those of operations called before.

    num_messages: default: one to each other rank.
    """
    my_turn = turnstile.take()

    def steps() -> Steps:
        yield my_turn
        request = post()
        turnstile.pass_on()
        axis.account.num_bytes += num_bytes
        axis.account.messages += axis.size - 1 if num_messages is None else num_messages
        yield Arrived([Posted(request, axis.ranks)])

    return steps()


def _blocks(
    x: Array, bounds: list[int], skipped: int | None = None
) -> tuple[Array, list[int], list[int], MPI.Datatype]:
    """Return MPI's (buffer, counts, displacements, type) of parts; a skipped one is empty."""
    width = x.dtype.itemsize
    if bounds[-1] * width > LIMIT:
        raise DtypeError(
            f"{bounds[-1] * width} bytes, but MPI's collectives address {LIMIT}; use comm.transport = "
            "messages"
        )
    counts = [
        0 if r == skipped else (end - begin) * width for r, (begin, end) in enumerate(zip(bounds, bounds[1:]))
    ]
    return raw(x), counts, [begin * width for begin in bounds[:-1]], MPI.BYTE
