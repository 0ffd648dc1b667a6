"""The collectives: each is started with one call over one axis and returns a Pending.

    operation       each rank gives         what comes of it                   result of the Pending
    all_reduce      x [P]                   the sum of all x, in place         x, on all ranks
    reduce          x [P], unchanged        the sum of all x                   out [P] on the root
    reduce_scatter  x [P], unchanged        its part of the sum of all x       out, its part of [P]
    all_gather      its part of [P]         all parts in order                 out [P], on all ranks
    gather          its part of [P]         all parts in order                 out [P] on the root
    scatter         the root: x [P]         its part of the root's x           out, its part of [P]
    broadcast       the root: x [P]         the root's x, in place             None
    all_to_all      x, `size` equal parts   part r comes from rank r, and      out, as long as x
                                            goes to rank r
    all_to_all_v    x, parts of any length  the same                           out
    shift           x [P], unchanged        the x of the rank `distance` back  out [P]
    barrier         nothing                 every rank has started its own     None

Where a root has the result, it is None elsewhere.

MPI moves bytes; we add. All arithmetic is local, neighbours in pairs, so the bits of a result
depend neither on the MPI, nor on the transport, nor on timing. Every operation is collective over
`axis`, and all ranks of the axis start the same operations in the same order: by it they are
matched, not by when their data is there.

Buffers belong to the operation until wait(). They are contiguous numpy arrays or torch tensors of
any length, 0 included, of float and integer dtypes in the byte order of the machine; what is
written is not read-only. What isn't summed may be bool and, in tensors, float8. An output may share
memory with the input, which costs a copy where it doesn't say so below. DtypeError is raised before
anything is sent.

Which rank owns which part of a buffer of P elements: rank r owns elements [P*r // size, P*(r+1) //
size) (see grid.split).
"""

import operator
from functools import partial
from itertools import chain
from typing import SupportsIndex

import numpy as np

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.buffers import (
    ALL,
    NOTHING,
    Array,
    address,
    copy,
    empty_like,
    flat,
    overlap,
    same_kind,
)
from mpitrain.comm.base.grid import split
from mpitrain.comm.progress import Pending, Steps
from mpitrain.comm.transports import messages
from mpitrain.errors import DtypeError


def all_reduce(x_P: Array, axis: Axis) -> Pending:
    """Start summing `x_P` in place over `axis`; the Pending's result is `x_P`.

    x_P: [P], neighbours summed in pairs, 16-bit floats in fp32.
    """
    x = flat(x_P, written=True, summed=True)
    return axis.start(partial(_all_reduce, axis), "all_reduce", x.nbytes, writes=[x], given=ALL, result=x_P)


def reduce(x_P: Array, axis: Axis, root: int = 0, out: Array | None = None) -> Pending:
    """Start summing `x_P` over `axis`; the Pending's result is the sum on `root`, None elsewhere.

    x_P: [P], left unchanged; summed as by all_reduce.
    out: [P], on the root only, made if not given; it may be `x_P` itself.
    """
    x = flat(x_P, summed=True)
    root = _root(root, axis, "reduce")
    out = _on_root(out, x, len(x), axis, root, "reduce")
    writes = [] if out is None else [out]

    steps = partial(_reduce, axis, root)
    return axis.start(steps, "reduce", x.nbytes, reads=[x], writes=writes, result=out)


def reduce_scatter(x_P: Array, axis: Axis, out: Array | None = None) -> Pending:
    """Start summing `x_P` over `axis`; the Pending's result is the shard that this rank owns.

    x_P: [P], left unchanged.
    out: [shard], made if not given; it may be the own shard of `x_P`: the rest stays unchanged.
    """
    x = flat(x_P, summed=True)
    own = _own(len(x), axis)
    length = own.stop - own.start
    out = empty_like(x, length) if out is None else flat(out, written=True)
    _require_length(out, length, "reduce_scatter: the shard")
    same_kind(x, out)

    steps = partial(_reduce_scatter, axis, own)
    return axis.start(steps, "reduce_scatter", x.nbytes, reads=[x], writes=[out], result=out)


def all_gather(shard: Array, axis: Axis, out: Array) -> Pending:
    """Start collecting every rank's shard in `out` on all ranks of `axis`; the Pending's result is `out`.

    out: [P].
    shard: the elements this rank owns of the P; it may be that very part of `out`.
    """
    out = flat(out, written=True)
    shard = flat(shard)
    same_kind(shard, out)
    own = _own(len(out), axis)
    _require_length(shard, own.stop - own.start, "all_gather: the shard")
    copy(_apart(shard, out, out[own]), out[own])
    steps = partial(_all_gather, axis)
    return axis.start(steps, "all_gather", out.nbytes, writes=[out], given=own, result=out)


def gather(shard: Array, axis: Axis, length: int, root: int = 0, out: Array | None = None) -> Pending:
    """Start collecting all shards on `root`; the Pending's result is [P] there, None elsewhere.

    length: P, alike on all ranks.
    shard: the elements this rank owns of the P, left unchanged.
    out: [P], on the root only, made if not given; `shard` may be its own part of it.
    """
    shard = flat(shard)
    root = _root(root, axis, "gather")
    length, own = _index(length, "gather: length"), _own(length, axis)
    _require_length(shard, own.stop - own.start, "gather: the shard")
    out = _on_root(out, shard, length, axis, root, "gather")
    if out is not None:
        shard = _apart(shard, out, out[own])
    num_bytes = length * shard.dtype.itemsize
    writes = [] if out is None else [out]

    steps = partial(_gather, axis, num_bytes, length, root)
    return axis.start(steps, "gather", num_bytes, reads=[shard], writes=writes, result=out)


def scatter(x_P: Array | None, axis: Axis, out: Array, length: int, root: int = 0) -> Pending:
    """Start sending each rank the part it owns of `root`'s `x_P`: the Pending's result, in `out`.

    length: P, alike on all ranks.
    x_P: [P], left unchanged; on the root only, and None elsewhere.
    out: the elements this rank owns of the P; on the root it may be that very part of `x_P`.
    """
    out = flat(out, written=True)
    root = _root(root, axis, "scatter")
    length, own = _index(length, "scatter: length"), _own(length, axis)
    _require_length(out, own.stop - own.start, "scatter: the part")
    if (x_P is None) == (axis.rank == root):
        given, needed = ("None", "an array") if x_P is None else ("an array", "None")
        raise DtypeError(
            f"scatter: found {given} on coordinate {axis.rank}, root {root}; needed {needed}: only the root "
            "gives one"
        )
    reads = [] if x_P is None else [flat(x_P)]
    for x in reads:
        _require_length(x, length, "scatter: the input")
        same_kind(x, out)
    reads = [x if address(out) == address(x[own]) else _apart(x, out, None) for x in reads]
    num_bytes = length * out.dtype.itemsize

    steps = partial(_scatter, axis, num_bytes, length, root)
    return axis.start(steps, "scatter", num_bytes, reads=reads, writes=[out], result=out)


def broadcast(x_P: Array, axis: Axis, root: int = 0) -> Pending:
    """Start sending `x_P` of coordinate `root` to all ranks of `axis`, in place; return a Pending."""
    x = flat(x_P, written=True)
    root = _root(root, axis, "broadcast")
    given = ALL if axis.rank == root else NOTHING
    return axis.start(partial(_broadcast, axis, root), "broadcast", x.nbytes, writes=[x], given=given)


def all_to_all(x_P: Array, axis: Axis, out: Array | None = None) -> Pending:
    """Start sending the r-th of `size` equal parts of `x_P` to rank r; the result is what came.

    x_P, out: [P], P a multiple of the axis size. Parts are in axis order.
    """
    length = len(flat(x_P))
    if length % axis.size:
        raise DtypeError(
            f"all_to_all: {length} elements over {axis.size} ranks; pad to a multiple or use all_to_all_v"
        )
    counts = [length // axis.size] * axis.size
    return _exchange("all_to_all", x_P, counts, counts, axis, out)


def all_to_all_v(
    x_P: Array, send_counts: list[int], receive_counts: list[int], axis: Axis, out: Array | None = None
) -> Pending:
    """Start sending consecutive parts of `x_P`, send_counts[r] to rank r; the result is what came.

    x_P: [sum(send_counts)], left unchanged.
    out: [sum(receive_counts)], in axis order; receive_counts[r] here is send_counts[own] on rank r.
    """
    return _exchange("all_to_all_v", x_P, send_counts, receive_counts, axis, out)


def _exchange(
    name: str, x_P: Array, send_counts: list[int], receive_counts: list[int], axis: Axis, out: Array | None
) -> Pending:
    x = flat(x_P)
    sent = _bounds(send_counts, axis, "send_counts")
    received = _bounds(receive_counts, axis, "receive_counts")
    out = empty_like(x, received[-1]) if out is None else flat(out, written=True)
    _require_length(x, sent[-1], f"{name}: the input")
    _require_length(out, received[-1], f"{name}: the output")
    same_kind(x, out)
    x = _apart(x, out, None)

    num_bytes = x.nbytes - (x[_own_part(sent, axis)].nbytes if name == "all_to_all_v" else 0)
    steps = partial(_exchange_parts, axis, sent, received)
    return axis.start(steps, name, num_bytes, reads=[x], writes=[out], result=out)


def shift(x_P: Array, axis: Axis, distance: int = 1, out: Array | None = None) -> Pending:
    """Start sending `x_P` to the rank `distance` further along `axis`, modulo its size.

    The Pending's result is what came, in `out`. P and `distance` are alike on all ranks.
    x_P: [P], left unchanged; it may be read before wait().  out: [P].
    The adjoint is the shift by -distance.
    """
    x = flat(x_P)
    distance = _index(distance, "shift: distance")
    out = empty_like(x, len(x)) if out is None else flat(out, written=True)
    _require_length(out, len(x), "shift: the output")
    same_kind(x, out)
    x = _apart(x, out, None)

    return axis.start(partial(_shift, axis, distance), "shift", x.nbytes, reads=[x], writes=[out], result=out)


def barrier(axis: Axis) -> Pending:
    """Start waiting until all ranks of `axis` have started their barrier.

    A sum of nothing by messages: MPI's Ibarrier would wait for its turn among late collectives.
    """
    return axis.start(lambda: messages.all_reduce(np.empty(0), axis), "barrier", 0)


# ------------------------------------------------- what runs when the buffers are where they can be read
# what was asked for, and then the buffers that Axis.start() is given


def _all_reduce(axis: Axis, x: Array) -> Steps:
    return axis.transport(x).all_reduce(x, axis)


def _reduce(axis: Axis, root: int, x: Array, out: Array | None = None) -> Steps:
    if out is None or not _in_the_way(x, out, x):
        return axis.transport(x).reduce(x, out, root, axis)
    received = empty_like(out, len(out))
    return chain(axis.transport(x).reduce(x, received, root, axis), messages.copied(received, out))


def _reduce_scatter(axis: Axis, own: slice, x: Array, out: Array) -> Steps:
    """own: the part of `x` whose sum goes to `out`."""
    if not _in_the_way(x, out, x[own]):
        return axis.transport(x).reduce_scatter(x, out, axis)
    received = empty_like(out, len(out))
    return chain(axis.transport(x).reduce_scatter(x, received, axis), messages.copied(received, out))


def _all_gather(axis: Axis, out: Array) -> Steps:
    return axis.transport(out).all_gather(out, axis)


def _gather(
    axis: Axis, num_bytes: int, length: int, root: int, shard: Array, out: Array | None = None
) -> Steps:
    transport = axis.one_level(shard, num_bytes=num_bytes)
    return transport.gather(shard, out, length, root, axis)


def _scatter(axis: Axis, num_bytes: int, length: int, root: int, *buffers: Array) -> Steps:
    """buffers: on the root what is read, and on all ranks what is written."""
    *given, out = buffers
    x = given[0] if given else None
    transport = axis.one_level(out, num_bytes=num_bytes)
    return transport.scatter(x, out, length, root, axis)


def _broadcast(axis: Axis, root: int, x: Array) -> Steps:
    return axis.transport(x).broadcast(x, root, axis)


def _exchange_parts(axis: Axis, sent: list[int], received: list[int], x: Array, out: Array) -> Steps:
    """sent, received: the bounds of the parts of each rank."""
    transport = axis.one_level(x, pairs=True)
    exchanged = transport.exchange(x, sent, out, received, axis)
    return messages.copied(x[_own_part(sent, axis)], out[_own_part(received, axis)], exchanged)


def _own_part(bounds: list[int], axis: Axis) -> slice:
    return slice(*bounds[axis.rank :][:2])


def _shift(axis: Axis, distance: int, x: Array, out: Array) -> Steps:
    if distance % axis.size == 0:
        return messages.copied(x, out)
    return axis.one_level(x).shift(x, out, distance, axis)


# ------------------------------------------------------------------------------- what is asked of buffers


def _bounds(counts: list[int], axis: Axis, what: str) -> list[int]:
    counts = [_index(count, f"all_to_all_v: {what}") for count in counts]
    if len(counts) != axis.size or min(counts) < 0:
        raise DtypeError(
            f"all_to_all_v: {what} = {counts}; needed {axis.size} counts of at least 0, one for each rank of "
            f"{axis.name}"
        )
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def _require_length(x: Array, length: int, what: str) -> None:
    if len(x) != length:
        raise DtypeError(f"{what} has {len(x)} elements, needed {length}")


def _own(length: int, axis: Axis) -> slice:
    begin, end = split(length, axis.size)[axis.rank : axis.rank + 2]
    return slice(begin, end)


def _on_root(out: Array | None, like: Array, length: int, axis: Axis, root: int, what: str) -> Array | None:
    """Return the result's memory: on the root `out`, or what is made for it, and None elsewhere."""
    if axis.rank != root:
        if out is not None:
            raise DtypeError(
                f"{what}: found an output on coordinate {axis.rank}; needed None: the result is on root "
                f"{root} only"
            )
        return None
    out = empty_like(like, length) if out is None else flat(out, written=True)
    _require_length(out, length, f"{what}: the output")
    same_kind(like, out)
    return out


def _index(value: SupportsIndex, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise DtypeError(f"{what}: found {value!r}, needed a whole number") from None


def _root(root: int, axis: Axis, what: str) -> int:
    root = _index(root, f"{what}: root")
    if not 0 <= root < axis.size:
        raise DtypeError(f"{what}: root {root} is not on axis {axis.name} of size {axis.size}")
    return root


def _apart(x: Array, out: Array, allowed: Array | None) -> Array:
    """Return `x`, or a copy of it if it shares memory with `out` and isn't `allowed` there."""
    if not overlap(x, out) or (allowed is not None and address(x) == address(allowed)):
        return x
    copied = empty_like(x, len(x))
    copy(x, copied)
    return copied


def _in_the_way(x: Array, out: Array, allowed: Array) -> bool:
    """Return whether `out` shares memory with `x`, not `allowed`: the result needs other memory.

    `x` itself is read: whether others can read it where it lies is alike on all ranks.
    """
    return overlap(x, out) and address(out) != address(allowed)
