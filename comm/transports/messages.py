"""Transport `messages`: our own Isend and Irecv; under a CUDA-aware MPI for device buffers, too.

Every operation has its own tag, taken when it is called, so operations overtake one another freely.
Large buffers go pairwise, small ones in log2(size) rounds (Bruck et al. 1997, for all-gather),
broadcasts down a binomial tree. What is for one rank goes to it straight.
"""

from collections import deque
from collections.abc import Iterable
from itertools import chain

import numpy as np

from mpitrain.comm.base.buffers import Array, ScratchTurn, copy, empty_like, on_device, raw, sum_in_order
from mpitrain.comm.base.grid import split
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.wire import ROUNDS, SMALL, pieces, rounds_of, under_way
from mpitrain.comm.device.staging import settled
from mpitrain.comm.progress import Arrived, Posted, Ready, Steps
from mpitrain.comm.transports.protocol import ExchangeFunction, TransportAxis

# of a sum: what is under way, the parts, where their sum goes, and lent memory
SumRound = tuple[list[Posted], list[Array], Array, np.ndarray | None]


def send(axis: TransportAxis, x: Array, rank: int, tag: int, *, synchronous: bool = False) -> list[Posted]:
    """Start sending the flat array `x`, in pieces of at most wire.LIMIT bytes.

    MPI owns `x` until the requests are complete.
    """
    post = axis.comm.Issend if synchronous else axis.comm.Isend
    data = raw(x)
    requests = [post([data[piece], MPI.BYTE], rank, tag) for piece in pieces(len(data))]
    axis.account.num_bytes += len(data)
    axis.account.messages += len(requests)
    return [Posted(request, (axis.ranks[rank],)) for request in requests]


def receive(axis: TransportAxis, x: Array, rank: int, tag: int) -> list[Posted]:
    """Start receiving into the flat array `x`, piece by piece as send(): MPI keeps their order."""
    data = raw(x)
    requests = [axis.comm.Irecv([data[piece], MPI.BYTE], rank, tag) for piece in pieces(len(data))]
    return [Posted(request, (axis.ranks[rank],)) for request in requests]


def exchange(x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis) -> Steps:
    """Send x[sent[r]:sent[r+1]] to every other rank r; receive its counterpart into `out`.

    Each rank starts with its right-hand neighbour, so that no rank is everybody's first target.
    """
    return _exchange(x, sent, out, received, axis, axis.next_tag())


def _exchange(
    x: Array, sent: list[int], out: Array, received: list[int], axis: TransportAxis, tag: int
) -> Steps:
    yield from settled(x, axis)
    yield Arrived(_exchanged(_parts(x, sent), _parts(out, received), axis, tag))


def _parts(x: Array, bounds: list[int]) -> list[Array]:
    return [x[begin:end] for begin, end in zip(bounds, bounds[1:])]


def shift(x: Array, out: Array, distance: int, axis: TransportAxis) -> Steps:
    """Send `x` `distance` ranks further along the axis; receive `out` from as far before."""
    return _shift(x, out, distance, axis, axis.next_tag())


def _shift(x: Array, out: Array, distance: int, axis: TransportAxis, tag: int) -> Steps:
    yield from settled(x, axis)
    requests = receive(axis, out, (axis.rank - distance) % axis.size, tag)
    yield Arrived(requests + send(axis, x, (axis.rank + distance) % axis.size, tag))


def reduce_scatter(x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`: exchange shards, then add them.

    Shards travel in rounds of wire.ROUND bytes: the others' parts take no more memory for a longer
    sum. On a device in one round, since each would wait for the sum of the one before.
    """
    if axis.size == 1 or on_device(x):
        return exchange_and_sum(exchange, x, out, axis)
    turn = axis.scratch.take_turn(under_way(x.nbytes, axis.size, x.dtype.itemsize))
    return _sum_in_rounds(x, out, turn, axis, axis.next_tag())


def _sum_in_rounds(x: Array, out: Array, turn: ScratchTurn, axis: TransportAxis, tag: int) -> Steps:
    """Exchange and add a part of every shard after the other, in the order of one tag's messages."""
    whole_shards = shards_of(x, axis)
    started: deque[SumRound] = deque()
    yield turn
    for part in rounds_of(len(x), axis.size, x.dtype.itemsize):
        if len(started) == ROUNDS:
            yield from _summed(started.popleft(), axis)
        shards = [shard[part] for shard in whole_shards]
        target = out[part]
        received, memory = axis.scratch.lend(x, axis.size * len(target))
        parts = [received[r * len(target) : (r + 1) * len(target)] for r in range(axis.size)]
        parts[axis.rank] = shards[axis.rank]
        started.append((_exchanged(shards, parts, axis, tag), parts, target, memory))
    while started:
        yield from _summed(started.popleft(), axis)
    turn.over = True


def _exchanged(shards: list[Array], parts: list[Array], axis: TransportAxis, tag: int) -> list[Posted]:
    """Start sending each other rank its shard, and receiving its part; neighbours first."""
    size = axis.size
    me = axis.rank
    requests = []
    for source in ((me - shift) % size for shift in range(1, size)):
        requests += receive(axis, parts[source], source, tag)
    for other in ((me + shift) % size for shift in range(1, size)):
        requests += send(axis, shards[other], other, tag)
    return requests


def _summed(round_: SumRound, axis: TransportAxis) -> Steps:
    requests, parts, target, memory = round_
    yield Arrived(requests)
    sum_in_order(parts, target)
    axis.scratch.give_back(memory)


def exchange_and_sum(exchange: ExchangeFunction, x: Array, out: Array, axis: TransportAxis) -> Steps:
    """Reduce-scatter by any `exchange`: all copies of the own shard come to scratch memory."""
    if axis.size == 1:
        return copied(x, out)
    bounds = split(len(x), axis.size)
    length = len(out)
    received, memory = axis.scratch.lend(x, axis.size * length)
    exchanged = exchange(x, bounds, received, [r * length for r in range(axis.size + 1)], axis)

    def steps() -> Steps:
        yield from exchanged
        parts = [received[r * length : (r + 1) * length] for r in range(axis.size)]
        parts[axis.rank] = x[bounds[axis.rank] : bounds[axis.rank + 1]]
        sum_in_order(parts, out)
        axis.scratch.give_back(memory)

    return steps()


def copied(x: Array, out: Array, further: Iterable[Ready] = ()) -> Steps:
    """Copy `x`, rounded if need be, over `out` after the steps before, and run `further` ones."""
    copy(x, out)
    yield from further


def shards_of(x: Array, axis: TransportAxis) -> list[Array]:
    """Return the part of `x` that each rank owns."""
    return _parts(x, split(len(x), axis.size))


def own_shard(x: Array, axis: TransportAxis) -> Array:
    """Return the part of `x` that this rank owns."""
    begin, end = split(len(x), axis.size)[axis.rank : axis.rank + 2]
    return x[begin:end]


def all_gather(out: Array, axis: TransportAxis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    return _all_gather(out, axis, axis.next_tag())


def _all_gather(out: Array, axis: TransportAxis, tag: int) -> Steps:
    shards = shards_of(out, axis)
    yield from settled(out, axis)
    yield Arrived(_exchanged([shards[axis.rank]] * axis.size, shards, axis, tag))


def all_reduce(x: Array, axis: TransportAxis) -> Steps:
    """Sum `x` in place: by reduce-scatter and all-gather; small ones by one gather and a sum."""
    if x.nbytes <= SMALL:
        return _gather_and_sum(x, axis, axis.next_tag())
    return chain(reduce_scatter(x, own_shard(x, axis), axis), all_gather(x, axis))


def _gather_and_sum(x: Array, axis: TransportAxis, tag: int) -> Steps:
    """Collect the `x` of every rank in log2(size) rounds, and sum them in axis order.

    Round k passes what was collected to the rank 2**k below; vector i here is that of (own + i) %
    size.
    """
    size = axis.size
    me = axis.rank
    length = len(x)
    received = empty_like(x, size * length)
    copy(x, received[:length])
    yield from settled(received, axis)
    have = 1
    while have < size:
        count = min(have, size - have)
        requests = receive(axis, received[have * length : (have + count) * length], (me + have) % size, tag)
        requests += send(axis, received[: count * length], (me - have) % size, tag)
        yield Arrived(requests)
        have += count
    sum_in_order([received[i * length : (i + 1) * length] for i in ((r - me) % size for r in range(size))], x)


def broadcast(x: Array, root: int, axis: TransportAxis) -> Steps:
    """Send the `x` of `root` to all others, down a binomial tree.

    Rank r (counted from the root) hears from r minus its lowest bit.
    """
    return _broadcast(x, root, axis, axis.next_tag())


def _broadcast(x: Array, root: int, axis: TransportAxis, tag: int) -> Steps:
    size = axis.size
    me = (axis.rank - root) % axis.size
    reach = me & -me if me else 1 << (size - 1).bit_length()
    yield from settled(x, axis)
    if me:
        yield Arrived(receive(axis, x, (me - reach + root) % size, tag))
    requests = []
    while reach := reach // 2:
        if me + reach < size:
            requests += send(axis, x, (me + reach + root) % size, tag)
    yield Arrived(requests)


def reduce(x: Array, out: Array | None, root: int, axis: TransportAxis) -> Steps:
    """Write the sum to `out` of `root`: by reduce-scatter and gather, if small by one gather."""
    if x.nbytes <= SMALL:
        return _gather_and_sum_at(x, out, root, axis, axis.next_tag())
    part, memory = part_for(x, out, axis)
    return chain(
        reduce_scatter(x, part, axis), gather(part, out, len(x), root, axis), given_back(memory, axis)
    )


def part_for(x: Array, out: Array | None, axis: TransportAxis) -> tuple[Array, np.ndarray | None]:
    """Return where this rank's part of a sum goes, in `out` or lent memory, and what to return."""
    own = own_shard(x, axis)
    return axis.scratch.lend(x, len(own)) if out is None else (own_shard(out, axis), None)


def given_back(memory: np.ndarray | None, axis: TransportAxis) -> Steps:
    """Give lent memory back, when the steps before are over."""
    axis.scratch.give_back(memory)
    yield from ()


def _gather_and_sum_at(x: Array, out: Array | None, root: int, axis: TransportAxis, tag: int) -> Steps:
    size = axis.size
    me = axis.rank
    length = len(x)
    yield from settled(x, axis)
    if me != root:
        yield Arrived(send(axis, x, root, tag))
        return
    received = empty_like(x, size * length)
    yield from settled(received, axis)
    parts = [x if rank == me else received[rank * length : (rank + 1) * length] for rank in range(size)]
    yield Arrived(
        [posted for rank in range(size) if rank != me for posted in receive(axis, parts[rank], rank, tag)]
    )
    sum_in_order(parts, out)


def gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis) -> Steps:
    """Collect every rank's part of `length` elements in `out` of `root`."""
    return _gather(part, out, length, root, axis, axis.next_tag())


def _gather(part: Array, out: Array | None, length: int, root: int, axis: TransportAxis, tag: int) -> Steps:
    size = axis.size
    me = axis.rank
    if me != root:
        yield from settled(part, axis)
        yield Arrived(send(axis, part, root, tag))
        return
    bounds = split(length, size)
    assert out is not None  # on the root
    copy(part, out[bounds[me] : bounds[me + 1]])
    yield from settled(out, axis)
    requests = []
    for rank in ((me + shift) % size for shift in range(1, size)):
        requests += receive(axis, out[bounds[rank] : bounds[rank + 1]], rank, tag)
    yield Arrived(requests)


def scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis) -> Steps:
    """Send every rank its part of the `length` elements in `x` of `root`."""
    return _scatter(x, out, length, root, axis, axis.next_tag())


def _scatter(x: Array | None, out: Array, length: int, root: int, axis: TransportAxis, tag: int) -> Steps:
    size = axis.size
    me = axis.rank
    if me != root:
        yield from settled(out, axis)
        yield Arrived(receive(axis, out, root, tag))
        return
    assert x is not None  # on the root
    yield from settled(x, axis)
    bounds = split(length, size)
    requests = []
    for rank in ((me + shift) % size for shift in range(1, size)):
        requests += send(axis, x[bounds[rank] : bounds[rank + 1]], rank, tag)
    copy(x[bounds[me] : bounds[me + 1]], out)
    yield Arrived(requests)
