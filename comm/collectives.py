"""The collectives: each is started with one call over one axis and returns a Pending.

MPI moves bytes; we add. All arithmetic is local, neighbours in pairs, so the bits of a result depend neither on the MPI, nor on the
transport, nor on timing. Every operation is collective over `axis`, and all ranks of the axis start the same operations in the same
order: by it they are matched, not by when their data is there. Buffers are contiguous numpy arrays or torch tensors of any float or
integer dtype and any length, 0 included; they belong to the operation until wait(). DtypeError is raised before anything is sent.

Which rank owns which part of a buffer of P elements: rank r owns elements [P*r // size, P*(r+1) // size) (see grid.split).
"""

import numpy as np

from mpitrain.comm import messages
from mpitrain.comm.axis import Axis
from mpitrain.comm.buffers import ALL, NOTHING, Array, copy, empty_like, flat, same_kind
from mpitrain.comm.grid import split
from mpitrain.comm.progress import Pending, Steps
from mpitrain.errors import DtypeError


def all_reduce(x_P: Array, axis: Axis) -> Pending:
    """Start summing `x_P` in place over `axis`; the Pending's result is `x_P`.

    x_P: [P], neighbours summed in pairs, 16-bit floats in fp32.
    """
    x = flat(x_P)
    return axis.start(lambda x: axis.transport(x).all_reduce(x, axis), "all_reduce", x.nbytes, writes=[x], given=ALL, result=x_P)


def reduce_scatter(x_P: Array, axis: Axis, out: Array | None = None) -> Pending:
    """Start summing `x_P` over `axis`, each rank receiving the shard it owns; the Pending's result is that shard.

    x_P: [P], left unchanged.  out: [shard], made if not given; it may be the own shard of `x_P`, then the rest stays unchanged.
    """
    x = flat(x_P)
    bounds = split(len(x), axis.size)
    length = bounds[axis.rank + 1] - bounds[axis.rank]
    out = empty_like(x, length) if out is None else flat(out)
    _require_length(out, length, "reduce_scatter: the shard")
    same_kind(x, out)
    operation = lambda x, out: axis.transport(x).reduce_scatter(x, out, axis)  # noqa: E731
    return axis.start(operation, "reduce_scatter", x.nbytes, reads=[x], writes=[out], result=out)


def all_gather(shard: Array, axis: Axis, out: Array) -> Pending:
    """Start collecting every rank's shard in `out` on all ranks of `axis`; the Pending's result is `out`.

    out: [P].  shard: the elements this rank owns of the P; it may be that very part of `out`.
    """
    out, shard = flat(out), flat(shard)
    same_kind(shard, out)
    bounds = split(len(out), axis.size)
    _require_length(shard, bounds[axis.rank + 1] - bounds[axis.rank], "all_gather: the shard")
    own = slice(bounds[axis.rank], bounds[axis.rank + 1])
    copy(shard, out[own])
    operation = lambda out: axis.transport(out).all_gather(out, axis)  # noqa: E731
    return axis.start(operation, "all_gather", out.nbytes, writes=[out], given=own, result=out)


def broadcast(x_P: Array, axis: Axis, root: int = 0) -> Pending:
    """Start sending `x_P` of coordinate `root` to all ranks of `axis`, in place; return a Pending."""
    if not 0 <= root < axis.size:
        raise DtypeError(f"broadcast: root {root} is not on axis {axis.name} of size {axis.size}")
    x = flat(x_P)
    given = ALL if axis.rank == root else NOTHING
    return axis.start(lambda x: axis.transport(x).broadcast(x, root, axis), "broadcast", x.nbytes, writes=[x], given=given)


def all_to_all(x_P: Array, axis: Axis, out: Array | None = None) -> Pending:
    """Start sending the r-th of `size` equal parts of `x_P` to rank r; the Pending's result holds the parts received, in axis order.

    x_P, out: [P], P a multiple of the axis size.
    """
    length = len(flat(x_P))
    if length % axis.size:
        raise DtypeError(f"all_to_all: {length} elements over {axis.size} ranks; pad to a multiple or use all_to_all_v")
    counts = [length // axis.size] * axis.size
    return _exchange("all_to_all", x_P, counts, counts, axis, out)


def all_to_all_v(x_P: Array, send_counts: list[int], receive_counts: list[int], axis: Axis, out: Array | None = None) -> Pending:
    """Start sending consecutive parts of `x_P`, send_counts[r] elements to rank r; the result holds what came, in axis order.

    x_P: [sum(send_counts)], left unchanged.  out: [sum(receive_counts)].  receive_counts[r] here equals send_counts[own] on rank r.
    """
    return _exchange("all_to_all_v", x_P, send_counts, receive_counts, axis, out)


def _exchange(name: str, x_P: Array, send_counts: list[int], receive_counts: list[int], axis: Axis, out: Array | None) -> Pending:
    x = flat(x_P)
    sent, received = _bounds(send_counts, axis, "send_counts"), _bounds(receive_counts, axis, "receive_counts")
    out = empty_like(x, received[-1]) if out is None else flat(out)
    _require_length(x, sent[-1], f"{name}: the input")
    _require_length(out, received[-1], f"{name}: the output")
    same_kind(x, out)

    own, own_out = slice(*sent[axis.rank :][:2]), slice(*received[axis.rank :][:2])

    def operation(x: Array, out: Array) -> Steps:
        return messages.copied(x[own], out[own_out], axis.transport(x, pairs=True).exchange(x, sent, out, received, axis))

    num_bytes = x.nbytes - (x[own].nbytes if name == "all_to_all_v" else 0)
    return axis.start(operation, name, num_bytes, reads=[x], writes=[out], result=out)


def shift(x_P: Array, axis: Axis, distance: int = 1, out: Array | None = None) -> Pending:
    """Start sending `x_P` to the rank `distance` further along `axis`, modulo its size; the Pending's result is what came, in `out`.

    x_P: [P], left unchanged; it may be read before wait().  out: [P], other memory than `x_P`.  P and `distance` are alike on all
    ranks. The adjoint is the shift by -distance.
    """
    x = flat(x_P)
    out = empty_like(x, len(x)) if out is None else flat(out)
    _require_length(out, len(x), "shift: the output")
    same_kind(x, out)

    def operation(x: Array, out: Array) -> Steps:
        return axis.transport(x).shift(x, out, distance, axis) if distance % axis.size else messages.copied(x, out)

    return axis.start(operation, "shift", x.nbytes, reads=[x], writes=[out], result=out)


def barrier(axis: Axis) -> Pending:
    """Start waiting for all ranks of `axis`: the Pending is complete when every rank has started its own.

    It is a sum of nothing, by messages: MPI's Ibarrier would have to wait for its turn among collectives whose data is late.
    """
    return axis.start(lambda: messages.all_reduce(np.empty(0), axis), "barrier", 0)


def _bounds(counts: list[int], axis: Axis, what: str) -> list[int]:
    """Turn counts into the bounds of consecutive parts."""
    if len(counts) != axis.size or min(counts) < 0:
        raise DtypeError(f"all_to_all_v: {what} = {counts}; needed {axis.size} counts of at least 0, one for each rank of {axis.name}")
    bounds = [0]
    for count in counts:
        bounds.append(bounds[-1] + count)
    return bounds


def _require_length(x: Array, length: int, what: str) -> None:
    if len(x) != length:
        raise DtypeError(f"{what} has {len(x)} elements, needed {length}")
