"""Hierarchical collectives: an axis over several nodes moves data inside of nodes and between them.

Each byte crosses once for each node.

    axis     0 1 2 3 | 4 5 6 7        8 ranks on 2 nodes
    near    [0 1 2 3] [4 5 6 7]       neighbours: the ranks of a node
    far     [0 4] [1 5] [2 6] [3 7]   those with the same place on every node

    all_reduce      near: reduce-scatter; far: all-reduce of the shard; near: all-gather
    reduce_scatter  near: each rank adds up, for every node, what the rank with its place there will
                    own; far: reduce-scatter of these
    all_gather      far: the own shard, to the ranks with the same place; near: what each has then
    broadcast       far: from the root to its place on every node; near: from there
    reduce          near: reduce-scatter; far: reduce of the shard, to the root's node; near, there:
                    gather

An all-to-all stays in one level: in two it sends as many bytes across, and was not faster for parts
of 16 B to 8 KB on 2 hosts of 4 ranks. So do gather and scatter: each byte has one way. Bits are
those of one level: neighbours are summed in pairs, so where a node has a power of two of ranks its
sum is a branch of the tree; otherwise sums go in one level. 16-bit floats stay in fp32 between the
levels and are rounded once. Whatever doesn't divide into equal shards goes in one level.
"""

from itertools import chain

from mpitrain.comm.base.axis_operations import READING, SUMS_AND_GATHERS, AxisOperations
from mpitrain.comm.base.buffers import Array, copy, empty_like, is_narrow, widened_like
from mpitrain.comm.base.nodes import Nodes
from mpitrain.comm.base.wire import SMALL
from mpitrain.comm.device.staging import settled
from mpitrain.comm.progress import Steps
from mpitrain.comm.transports import messages
from mpitrain.comm.transports.protocol import TransportAxis


def carried_near_and_far(carried: AxisOperations) -> AxisOperations:
    """Return what each level carries for an axis that carries this."""
    parts = {"all_reduce", "reduce_scatter", "all_gather"} if carried.operations & SUMS_AND_GATHERS else set()
    if "reduce" in carried.operations:
        parts |= {"gather"}
    return AxisOperations(frozenset(parts | carried.operations & READING), carried.most_bytes)


def _levels(axis: TransportAxis) -> tuple[Nodes, TransportAxis, TransportAxis]:
    """Return how an axis lies on nodes, and its axes on this node and over nodes."""
    assert axis.nodes is not None and axis.near is not None and axis.far is not None
    return axis.nodes, axis.near, axis.far


# ---------------------------------------------------------- operations, as the transports have them


def all_reduce(x: Array, axis: TransportAxis) -> Steps:
    """Sum `x` in place over the axis."""
    nodes, near, far = _levels(axis)
    narrow = is_narrow(x)
    if not nodes.sums or (narrow and x.nbytes <= SMALL):
        return axis.one_level(x).all_reduce(x, axis)
    if x.nbytes <= SMALL:
        return chain(near.transport(x).all_reduce(x, near), far.transport(x).all_reduce(x, far))
    own = messages.own_shard(x, near)
    part = widened_like(x, len(own)) if narrow else own
    last = messages.own_shard(own, far)
    summed = widened_like(x, len(last)) if narrow else last
    return chain(
        _reduce_scatter(x, part, near),
        far.transport(part).reduce_scatter(part, summed, far),
        messages.copied_later(summed, last),
        far.transport(own).all_gather(own, far),
        near.transport(x).all_gather(x, near),
    )


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`."""
    nodes, near, far = _levels(axis)
    narrow = is_narrow(x)
    if len(x) % axis.size or not nodes.sums:
        return axis.one_level(x).reduce_scatter(x, out, axis)
    sorted_, memory = axis.scratch.lend(x, len(x))
    part = widened_like(x, len(x) // near.size) if narrow else empty_like(x, len(x) // near.size)
    summed = widened_like(x, len(out)) if narrow else out
    levels = chain(
        _reduce_scatter(sorted_, part, near),
        far.transport(part).reduce_scatter(part, summed, far),
        messages.copied_later(summed, out),
    )

    def steps() -> Steps:
        yield from settled(x, axis)
        _transpose(x, sorted_, far.size, near.size)
        yield from levels
        axis.scratch.give_back(memory)

    return steps()


def all_gather(out: Array, axis: TransportAxis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    _, near, far = _levels(axis)
    if len(out) % axis.size:
        return axis.one_level(out).all_gather(out, axis)
    found, memory = axis.scratch.lend(out, len(out))
    mine = messages.own_shard(found, near)
    levels = chain(far.transport(mine).all_gather(mine, far), near.transport(found).all_gather(found, near))

    def steps() -> Steps:
        yield from settled(out, axis)
        copy(messages.own_shard(out, axis), messages.own_shard(mine, far))
        yield from levels
        _transpose(found, out, near.size, far.size)
        axis.scratch.give_back(memory)

    return steps()


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others."""
    _, near, far = _levels(axis)
    node, place = divmod(root, near.size)
    first = far.transport(x).broadcast(x, node, far) if near.rank == place else iter(())
    return chain(first, near.transport(x).broadcast(x, place, near))


def reduce(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    """Write the sum of `x` over the axis to `out` of `root`."""
    nodes, near, far = _levels(axis)
    narrow = is_narrow(x)
    if not nodes.sums or x.nbytes <= SMALL:
        return axis.one_level(x).reduce(x, out, root, axis)
    node, place = divmod(root, near.size)
    length = len(messages.own_shard(x, near))
    part = widened_like(x, length) if narrow else empty_like(x, length)
    summed = part if far.rank == node else None
    levels = chain(_reduce_scatter(x, part, near), far.transport(part).reduce(part, summed, node, far))
    if far.rank != node:
        return levels
    last = empty_like(x, length) if out is None else messages.own_shard(out, near)
    gathered = near.transport(x).gather(last, out, len(x), place, near)
    return chain(levels, messages.copied_later(part, last), gathered)


def gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    """Collect every rank's part in `out` of `root`: each byte has one way."""
    return axis.one_level(part, num_bytes=length * part.dtype.itemsize).gather(part, out, length, root, axis)


def scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    """Send every rank its part of the `x` of `root`: each byte has one way."""
    return axis.one_level(out, num_bytes=length * out.dtype.itemsize).scatter(x, out, length, root, axis)


def exchange(x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis) -> Steps:
    """Send x[sent[r]:sent[r+1]] to every rank r: each byte has one way."""
    return axis.one_level(x, pairs=True).exchange(x, sent, out, received, axis)


def shift(x: Array, out: Array, distance: int, axis: TransportAxis) -> Steps:
    """Send `x` to the rank `distance` further along the axis: each byte has one way."""
    return axis.one_level(x).shift(x, out, distance, axis)


def _reduce_scatter(x: Array, part: Array, near: TransportAxis) -> Steps:
    """Write the own shard of the sum over the near axis to `part`, in fp32 if `x` are 16-bit floats."""
    if not is_narrow(x):
        return near.transport(x).reduce_scatter(x, part, near)
    return messages.reduce_scatter(x, part, near)


def _transpose(x: Array, out: Array, rows: int, columns: int) -> None:
    """Write `x`, `rows` x `columns` runs of elements, to `out`, column by column."""
    length = len(x) // (rows * columns)
    if length:
        copy(x.reshape(rows, columns, length).swapaxes(0, 1), out.reshape(columns, rows, length))
