"""What an operation makes a rank send: formulas, in integers. What is really posted is counted in comm/account.py.

n ranks, a buffer of N bytes (of all ranks together for all_gather, of each for the others), S of them this rank's shard (grid.split):

    reduce_scatter   N - S            N (n-1)/n, if n divides the buffer
    all_gather       S (n-1)          the same
    all_reduce       the two together, 2 N (n-1)/n; `messages` up to SMALL bytes: N (n-1), everything to everyone in log2(n) rounds
    all_to_all       N (n-1)/n        parts of equal size; all_to_all_v: N, the own part isn't counted
    shift, send      N                receive, barrier: 0

`shared` reads instead, as many bytes: S (n-1) to reduce, N - S to gather. It exchanges and shifts by messages; `collectives` exchanges so.

In two levels (comm/levels.py), m ranks on each of k nodes: the bytes of each phase by the formulas for its axis. Of an all-reduce a node
sends 2 N (k-1)/k across in all, in one level 2 N m (k-1)/k.
"""

from typing import NamedTuple

from mpitrain.comm.carried import READING
from mpitrain.comm.grid import split

LIMIT = 1 << 30  # bytes of one message: counts in MPI 3 are 32-bit, and Open MPI 5 has no others
SMALL = 1 << 13  # bytes up to which an all-reduce of `messages` gathers everything everywhere: one phase of log2(size) messages


def pieces(num_bytes: int) -> list[slice]:
    """Return the pieces of at most LIMIT bytes that a part of `num_bytes` is sent in; nothing is sent as one of no bytes."""
    return [slice(at, at + LIMIT) for at in range(0, max(num_bytes, 1), LIMIT)]


def sent_bytes(operation: str, num_bytes: int, size: int, rank: int = 0, *, itemsize: int = 1, transport: str = "messages") -> int:
    """Return the bytes that coordinate `rank` of an axis of `size` ranks sends, or reads, for a buffer of `num_bytes`.

    itemsize: bytes per element, which no shard divides.
    """
    if operation in ("shift", "send", "all_to_all_v"):
        return num_bytes * (size > 1)
    if operation in ("receive", "barrier"):
        return 0
    if operation == "all_to_all":
        return num_bytes // size * (size - 1)
    if operation == "all_reduce" and transport == "messages" and num_bytes <= SMALL:
        return num_bytes * (size - 1)
    begin, end = split(num_bytes // itemsize, size)[rank : rank + 2]
    shard = (end - begin) * itemsize
    to_reduce, to_gather = num_bytes - shard, shard * (size - 1)
    if transport == "shared":
        to_reduce, to_gather = to_gather, to_reduce
    return {"reduce_scatter": to_reduce, "all_gather": to_gather, "all_reduce": to_reduce + to_gather}[operation]


def sent_messages(operation: str, num_bytes: int, size: int, rank: int = 0, *, itemsize: int = 1, transport: str = "messages") -> int:
    """Return how many messages coordinate `rank` of an axis of `size` ranks sends for a buffer of `num_bytes`.

    None has more than LIMIT bytes, but of MPI's collectives: one to each other rank is counted.
    """
    if size == 1 or operation == "receive" or (transport == "shared" and operation in READING):
        return 0
    if transport == "collectives" and (operation in READING or operation == "shift"):
        return (size - 1) * (2 if operation == "all_reduce" else 1)
    return sum(len(pieces(part)) for part in _parts(operation, num_bytes, size, rank, itemsize))


def _parts(operation: str, num_bytes: int, size: int, rank: int, itemsize: int) -> list[int]:
    """Return the bytes of each part that a rank sends by `messages`; of an all_to_all_v, if it sends as much to each."""
    if operation in ("send", "shift"):
        return [num_bytes]
    if operation == "barrier" or (operation == "all_reduce" and num_bytes <= SMALL):
        return [num_bytes * min(1 << k, size - (1 << k)) for k in range((size - 1).bit_length())]
    if operation == "all_to_all":
        return [num_bytes // size] * (size - 1)
    if operation == "all_to_all_v":
        return _lengths(num_bytes, size - 1)
    shards = [length * itemsize for length in _lengths(num_bytes // itemsize, size)]
    to_reduce = [] if operation == "all_gather" else shards[:rank] + shards[rank + 1 :]
    to_gather = [] if operation == "reduce_scatter" else [shards[rank]] * (size - 1)
    return to_reduce + to_gather


def _lengths(length: int, size: int) -> list[int]:
    bounds = split(length, size)
    return [end - begin for begin, end in zip(bounds, bounds[1:])]


class Phase(NamedTuple):
    """One phase of an operation in two levels. far: over nodes.  itemsize: of an element of its buffer."""

    far: bool
    operation: str
    num_bytes: int
    itemsize: int


def phases(
    operation: str, num_bytes: int, near: tuple[int, int], far: tuple[int, int], *, itemsize: int, narrow: bool
) -> list[Phase] | None:
    """Return what an operation in two levels consists of; None: it goes in one.

    near, far: (coordinate, size) on both axes.  narrow: elements are 16-bit floats, which are summed in fp32.
    """
    (place, m), (_, k), wide = near, far, 4 if narrow else itemsize
    even, sums = num_bytes // itemsize % (m * k) == 0, not m & (m - 1)
    begin, end = split(num_bytes // itemsize, m)[place : place + 2]
    part = end - begin
    if operation == "all_reduce" and sums and num_bytes <= SMALL and not narrow:
        return [Phase(each, "all_reduce", num_bytes, itemsize) for each in (False, True)]
    if operation == "all_reduce" and sums and num_bytes > SMALL:
        there = [Phase(False, "reduce_scatter", num_bytes, itemsize), Phase(True, "reduce_scatter", part * wide, wide)]
        return [*there, Phase(True, "all_gather", part * itemsize, itemsize), Phase(False, "all_gather", num_bytes, itemsize)]
    if operation == "reduce_scatter" and sums and even:
        return [Phase(False, "reduce_scatter", num_bytes, itemsize), Phase(True, "reduce_scatter", part * wide, wide)]
    if operation == "all_gather" and even:
        return [Phase(True, "all_gather", part * itemsize, itemsize), Phase(False, "all_gather", num_bytes, itemsize)]
    return None


def sent_over_nodes(operation: str, num_bytes: int, nodes: tuple[int, int], rank: int) -> int:
    """Return the bytes that coordinate `rank` sends by `messages` on an axis of (ranks on each node, nodes), in two levels where it can."""
    (near, far), (node, place) = nodes, divmod(rank, nodes[0])
    found = phases(operation, num_bytes, (place, near), (node, far), itemsize=1, narrow=False)
    if found is None:
        return sent_bytes(operation, num_bytes, near * far, rank)
    ends = {False: (near, place), True: (far, node)}
    return sum(sent_bytes(each.operation, each.num_bytes, *ends[each.far]) for each in found)
