"""Hierarchical collectives: an axis over several nodes moves data inside of nodes and between them.

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

Each byte crosses once for each node. An all-to-all stays in one level: in two it sends as many
bytes across, and was not faster for parts of 16 B to 8 KB on 2 hosts of 4 ranks. So do gather and
scatter: each byte has one way. Bits are those of one level: neighbours are summed in pairs, so a
power of two of ranks on a node is a branch of the tree; others go in one level, as does what
doesn't divide into equal shards. 16-bit floats stay in fp32 between the levels and are rounded
once.

What a reduce-scatter sends, and an all-gather brings, lies node by node in constant memory
(comm/base/sorting.py): so much of every shard goes through it in a round (wire.sorted_rounds).
"""

from itertools import chain

from mpitrain.comm.base.axis_operations import READING, SUMS_AND_GATHERS, AxisOperations
from mpitrain.comm.base.buffers import Array, copy, empty_like, is_narrow, widened_like
from mpitrain.comm.base.nodes import Nodes
from mpitrain.comm.base.wire import SMALL, sorted_rounds
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
        return chain(near.one_level(x).all_reduce(x, near), far.one_level(x).all_reduce(x, far))
    own = messages.own_shard(x, near)
    last = messages.own_shard(own, far)
    part, memory = axis.scratch.lend(widened_like(x, 0), len(own)) if narrow else (own, None)
    summed, more = axis.scratch.lend(widened_like(x, 0), len(last)) if narrow else (last, None)
    return chain(
        _reduce_scatter(x, part, near),
        far.one_level(part).reduce_scatter(part, summed, far),
        messages.copied(summed, last),
        messages.given_back(memory, axis),
        messages.given_back(more, axis),
        far.one_level(own).all_gather(own, far),
        near.one_level(x).all_gather(x, near),
    )


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`, a round after the other."""
    nodes, _, _ = _levels(axis)
    if len(x) % axis.size or not nodes.sums:
        return axis.one_level(x).reduce_scatter(x, out, axis)
    rounds = sorted_rounds(len(out), axis.size, x.dtype.itemsize)
    return chain(settled(x, axis), *(_scattered(x, out, one_round, axis) for one_round in rounds))


def _scattered(x: Array, out: Array, part: slice, axis: TransportAxis) -> Steps:
    _, near, far = _levels(axis)
    narrow = is_narrow(x)
    length = part.stop - part.start
    wanted = [(axis.size * length, False), (far.size * length, narrow), (length if narrow else 0, narrow)]
    (sorted_, summed_here, summed), turn = axis.sorting.take(x, wanted)
    if not narrow:
        summed = out[part]
    levels = chain(
        _reduce_scatter(sorted_, summed_here, near),
        far.one_level(summed_here).reduce_scatter(summed_here, summed, far),
        messages.copied(summed, out[part]),
    )

    def steps() -> Steps:
        yield turn
        shares = x.reshape(far.size, near.size, len(out))[:, :, part]
        copy(shares.swapaxes(0, 1), sorted_.reshape(near.size, far.size, length))
        yield from levels
        turn.over = True

    return steps()


def all_gather(out: Array, axis: TransportAxis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input. In rounds, too."""
    if len(out) % axis.size:
        return axis.one_level(out).all_gather(out, axis)
    rounds = sorted_rounds(len(out) // axis.size, axis.size, out.dtype.itemsize)
    return chain(settled(out, axis), *(_gathered(out, one_round, axis) for one_round in rounds))


def _gathered(out: Array, part: slice, axis: TransportAxis) -> Steps:
    _, near, far = _levels(axis)
    length = part.stop - part.start
    (received,), turn = axis.sorting.take(out, [(axis.size * length, False)])
    mine = messages.own_shard(received, near)
    levels = chain(
        far.one_level(mine).all_gather(mine, far), near.one_level(received).all_gather(received, near)
    )

    def steps() -> Steps:
        yield turn
        copy(messages.own_shard(out, axis)[part], messages.own_shard(mine, far))
        yield from levels
        shares = out.reshape(far.size, near.size, len(out) // axis.size)[:, :, part]
        copy(received.reshape(near.size, far.size, length).swapaxes(0, 1), shares)
        turn.over = True

    return steps()


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others."""
    _, near, far = _levels(axis)
    node, place = divmod(root, near.size)
    first = far.one_level(x).broadcast(x, node, far) if near.rank == place else iter(())
    return chain(first, near.one_level(x).broadcast(x, place, near))


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
    levels = chain(_reduce_scatter(x, part, near), far.one_level(part).reduce(part, summed, node, far))
    if far.rank != node:
        return levels
    last = empty_like(x, length) if out is None else messages.own_shard(out, near)
    gathered = near.one_level(x).gather(last, out, len(x), place, near)
    return chain(levels, messages.copied(part, last), gathered)


def _reduce_scatter(x: Array, part: Array, near: TransportAxis) -> Steps:
    """Write the own shard of the sum over the near axis to `part`, in fp32 if `x` are 16-bit floats."""
    if not is_narrow(x):
        return near.one_level(x).reduce_scatter(x, part, near)
    return messages.reduce_scatter(x, part, near)
