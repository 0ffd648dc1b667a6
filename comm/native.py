"""Transport `collectives`: MPI's own non-blocking collectives, on bytes and on host buffers. MPI only moves; we add.

MPI matches the collectives of one communicator by their order. First phases are posted in program order; the second phase of an
all-reduce is posted when the first is complete, and that differs from rank to rank. So second phases have a communicator of their
own and pass a turnstile in the order in which their operations were started.

MPI chooses the way of a gather or a broadcast; counted as sent is what the others get from this rank.
"""

from mpi4py import MPI

from mpitrain.comm import messages
from mpitrain.comm.buffers import Array, raw
from mpitrain.comm.grid import split
from mpitrain.comm.progress import Steps, arrived
from mpitrain.errors import DtypeError

LIMIT = (1 << 31) - 1  # bytes an operation can address: displacements are C ints; larger buffers go by `messages`


class Turnstile:
    """Lets the holders of tickets pass in the order in which they took them."""

    def __init__(self):
        self._taken = self._passed = 0

    def take(self):
        """Take a ticket: return the function that says whether its turn has come."""
        ticket, self._taken = self._taken, self._taken + 1
        return lambda: self._passed == ticket

    def pass_on(self) -> None:
        """Let the next one pass."""
        self._passed += 1


def exchange(x: Array, sent: list[int], out: Array, received: list[int], axis) -> Steps:
    """Send x[sent[r]:sent[r+1]] to every rank r and receive its counterpart into `out`. The own part is not moved."""
    blocks = _blocks(x, sent, axis.rank)
    axis.account.num_bytes += sum(blocks[1])
    yield arrived([axis.comm.Ialltoallv(blocks, _blocks(out, received, axis.rank))])


def shift(x: Array, out: Array, distance: int, axis) -> Steps:
    """Send `x` to the rank `distance` further along the axis: an exchange in which one part is everything."""
    target, source = (axis.rank + distance) % axis.size, (axis.rank - distance) % axis.size
    sent, received = ([0] * (r + 1) + [len(x)] * (axis.size - r) for r in (target, source))
    yield from exchange(x, sent, out, received, axis)


def reduce_scatter(x: Array, out: Array, axis) -> Steps:
    """Write the sum over the axis of the own shard of `x` to `out`: exchange shards, then add them."""
    yield from messages.exchange_and_sum(exchange, x, out, axis)


def all_gather(out: Array, axis) -> Steps:
    """Fill every shard of `out` with that of its rank; the own shard is the input."""
    yield from _all_gather(out, axis, axis.comm)


def all_reduce(x: Array, axis) -> Steps:
    """Sum `x` in place over the axis: reduce-scatter and all-gather."""
    my_turn, bounds = axis.turnstile.take(), split(len(x), axis.size)
    yield from reduce_scatter(x, x[bounds[axis.rank] : bounds[axis.rank + 1]], axis)
    yield my_turn
    second_phase = _all_gather(x, axis, axis.second)
    posted = next(second_phase)
    axis.turnstile.pass_on()
    yield posted


def broadcast(x: Array, root: int, axis) -> Steps:
    """Send the `x` of `root` to all others."""
    axis.account.num_bytes += x.nbytes * (axis.size - 1) * (axis.rank == root)
    yield arrived([axis.comm.Ibcast([raw(x), MPI.BYTE], root)])


def _all_gather(out: Array, axis, comm: MPI.Comm) -> Steps:
    blocks = _blocks(out, split(len(out), axis.size))
    axis.account.num_bytes += blocks[1][axis.rank] * (axis.size - 1)
    yield arrived([comm.Iallgatherv(MPI.IN_PLACE, blocks)])


def _blocks(x: Array, bounds: list[int], skipped: int | None = None) -> list:
    """Describe the parts of `x` between `bounds` as MPI's (buffer, counts, displacements, type); a skipped part counts as empty."""
    width = x.dtype.itemsize
    if bounds[-1] * width > LIMIT:
        raise DtypeError(f"{bounds[-1] * width} bytes, but MPI's collectives address {LIMIT}; use comm.transport = messages")
    counts = [0 if r == skipped else (end - begin) * width for r, (begin, end) in enumerate(zip(bounds, bounds[1:]))]
    return [raw(x), counts, [begin * width for begin in bounds[:-1]], MPI.BYTE]
