"""What an operation makes a rank send: formulas, in integers.

What is really posted is counted in comm/account.py.

n ranks, a buffer of N bytes (of all ranks together for all_gather, of each for the others), S of
them this rank's shard (grid.split):

    reduce_scatter  N - S            N (n-1)/n, if n divides the buffer
    all_gather      S (n-1)          the same
    all_reduce      the two together, 2 N (n-1)/n; `messages` up to SMALL bytes: N (n-1), everything
                    to everyone in log2(n) rounds
    all_to_all      N (n-1)/n        parts of equal size; all_to_all_v: N, the own part isn't
                                     counted
    shift, send     N                receive, barrier: 0
    scatter         N - S on the root, else 0
    gather          0 on the root, else S
    reduce          N - S, and S unless it is the root; `messages` up to SMALL bytes: 0 on the root,
                    else N
    broadcast       N (n-1) over all ranks; `messages` down a tree: N to each of a rank's log2(n)
                    children at most

`shared` reads instead, as many bytes: S (n-1) to reduce, N - S to gather. It exchanges and shifts
by messages; `collectives` exchanges so. What the root sends there, the others read, and the other
way round.

In two levels (comm/levels.py), m ranks on each of k nodes: the bytes of each phase by the formulas
for its axis. Of an all-reduce a node sends 2 N (k-1)/k across in all, in one level 2 N m (k-1)/k.
"""

from typing import NamedTuple

from mpitrain.comm.axis_operations import AUTO_SHARED, READING
from mpitrain.comm.grid import split

LIMIT = 1 << 30  # bytes of one message: counts in MPI 3 are 32-bit, and Open MPI 5 has no others
WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
# bytes up to which an all-reduce of `messages` gathers everything everywhere: one phase of
# log2(size) messages
SMALL = 1 << 13


def pieces(num_bytes: int) -> list[slice]:
    """Return the pieces of at most LIMIT bytes that a part of `num_bytes` is sent in.

    Nothing is sent as one of no bytes.
    """
    return [slice(at, at + LIMIT) for at in range(0, max(num_bytes, 1), LIMIT)]


def transport_on_a_node(wanted: str, operation: str, num_bytes: int) -> str:
    """Return which transport takes an operation on host buffers of an axis whose ranks share a
    node, as Axis.by_size() chooses it.

    wanted: comm.transport.  num_bytes: of its buffer.
    """
    if wanted in ("shared", "auto") and operation in READING:
        return "shared" if wanted == "shared" or num_bytes >= AUTO_SHARED else "messages"
    return "collectives" if wanted == "collectives" and operation in READING else "messages"


def sent_bytes(
    operation: str,
    num_bytes: int,
    size: int,
    rank: int = 0,
    *,
    itemsize: int = 1,
    transport: str = "messages",
    root: int = 0,
) -> int:
    """Return the bytes that coordinate `rank` of an axis of `size` ranks sends, or reads, for a
    buffer of `num_bytes`.

    itemsize: bytes per element, which no shard divides.  root: of an operation that has one.
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
    to_reduce = num_bytes - shard
    to_gather = shard * (size - 1)
    if operation in WITH_ROOT:
        return _sent_with_root(operation, num_bytes, size, rank, root, shard, transport)
    if transport == "shared":
        to_reduce, to_gather = to_gather, to_reduce
    return {"reduce_scatter": to_reduce, "all_gather": to_gather, "all_reduce": to_reduce + to_gather}[
        operation
    ]


def _sent_with_root(
    operation: str, num_bytes: int, size: int, rank: int, root: int, shard: int, transport: str
) -> int:
    """Return the bytes that a rank sends or reads of an operation with a root; shard: the bytes of
    its part.
    """
    is_root = rank == root
    reads = transport == "shared"
    if operation == "broadcast":
        if transport == "messages":
            return num_bytes * _children(size, (rank - root) % size)
        return num_bytes * (not is_root if reads else (size - 1) * is_root)
    to_root = (num_bytes - shard) * is_root if reads else shard * (not is_root)
    if operation == "gather":
        return to_root
    if operation == "scatter":
        return shard * (not is_root) if reads else (num_bytes - shard) * is_root
    if transport == "messages" and num_bytes <= SMALL:
        return num_bytes * (not is_root)
    return to_root + (shard * (size - 1) if reads else num_bytes - shard)


def _children(size: int, place: int) -> int:
    """Return to how many ranks the one at a place of the tree of a broadcast sends; the root's place is 0."""
    reach = place & -place if place else 1 << (size - 1).bit_length()
    return sum(place + (1 << k) < size for k in range(reach.bit_length() - 1))


def sent_messages(
    operation: str,
    num_bytes: int,
    size: int,
    rank: int = 0,
    *,
    itemsize: int = 1,
    transport: str = "messages",
    root: int = 0,
) -> int:
    """Return how many messages coordinate `rank` of an axis of `size` ranks sends for a buffer of
    `num_bytes`.

    None has more than LIMIT bytes, but of MPI's collectives: one to each other rank is counted.
    """
    if size == 1 or operation == "receive" or (transport == "shared" and operation in READING):
        return 0
    if transport == "collectives" and operation in WITH_ROOT:
        to_root = int(rank != root)
        from_root = (size - 1) * (rank == root)
        return {"gather": to_root, "reduce": size - 1 + to_root}.get(operation, from_root)
    if transport == "collectives" and (operation in READING or operation == "shift"):
        return (size - 1) * (2 if operation == "all_reduce" else 1)
    return sum(len(pieces(part)) for part in _parts(operation, num_bytes, size, rank, itemsize, root))


def _parts(operation: str, num_bytes: int, size: int, rank: int, itemsize: int, root: int) -> list[int]:
    """Return the bytes of each part that a rank sends by `messages`.

    Of an all_to_all_v, if it sends as much to each.
    """
    if operation in ("send", "shift"):
        return [num_bytes]
    if operation == "barrier" or (operation == "all_reduce" and num_bytes <= SMALL):
        return [num_bytes * min(1 << k, size - (1 << k)) for k in range((size - 1).bit_length())]
    if operation == "all_to_all":
        return [num_bytes // size] * (size - 1)
    if operation == "all_to_all_v":
        return _lengths(num_bytes, size - 1)
    if operation == "broadcast":
        return [num_bytes] * _children(size, (rank - root) % size)
    shards = [length * itemsize for length in _lengths(num_bytes // itemsize, size)]
    if operation in WITH_ROOT:
        return _parts_with_root(operation, num_bytes, shards, rank, root)
    to_reduce = [] if operation == "all_gather" else shards[:rank] + shards[rank + 1 :]
    to_gather = [] if operation == "reduce_scatter" else [shards[rank]] * (size - 1)
    return to_reduce + to_gather


def _parts_with_root(operation: str, num_bytes: int, shards: list[int], rank: int, root: int) -> list[int]:
    others = shards[:rank] + shards[rank + 1 :]
    to_root = [shards[rank]] * (rank != root)
    if operation == "reduce" and num_bytes <= SMALL:
        return [num_bytes] * (rank != root)
    return {"gather": to_root, "scatter": others * (rank == root), "reduce": others + to_root}[operation]


def _lengths(length: int, size: int) -> list[int]:
    bounds = split(length, size)
    return [end - begin for begin, end in zip(bounds, bounds[1:])]


class Phase(NamedTuple):
    """One phase of an operation in two levels.

    far: over nodes.
    itemsize: of an element of its buffer.
    root: on its axis.
    """

    far: bool
    operation: str
    num_bytes: int
    itemsize: int
    root: int = 0


def phases(
    operation: str,
    num_bytes: int,
    near: tuple[int, int],
    far: tuple[int, int],
    *,
    itemsize: int,
    narrow: bool,
    root: int = 0,
) -> list[Phase] | None:
    """Return what an operation in two levels consists of; None: it goes in one.

    near, far: (coordinate, size) on both axes.
    narrow: elements are 16-bit floats, which are summed in fp32.
    """
    (place, m), (node, k), wide = near, far, 4 if narrow else itemsize
    even = num_bytes // itemsize % (m * k) == 0
    sums = not m & (m - 1)
    begin, end = split(num_bytes // itemsize, m)[place : place + 2]
    part = end - begin
    if operation == "all_reduce" and sums and num_bytes <= SMALL and not narrow:
        return [Phase(each, "all_reduce", num_bytes, itemsize) for each in (False, True)]
    if operation == "all_reduce" and sums and num_bytes > SMALL:
        there = [
            Phase(False, "reduce_scatter", num_bytes, itemsize),
            Phase(True, "reduce_scatter", part * wide, wide),
        ]
        return [
            *there,
            Phase(True, "all_gather", part * itemsize, itemsize),
            Phase(False, "all_gather", num_bytes, itemsize),
        ]
    if operation == "reduce" and sums and num_bytes > SMALL:
        to_node, of_place = divmod(root, m)
        there = [
            Phase(False, "reduce_scatter", num_bytes, itemsize),
            Phase(True, "reduce", part * wide, wide, to_node),
        ]
        return there + [Phase(False, "gather", num_bytes, itemsize, of_place)] * (node == to_node)
    if operation == "broadcast":
        to_node, of_place = divmod(root, m)
        across = [Phase(True, "broadcast", num_bytes, itemsize, to_node)] * (place == of_place)
        return [*across, Phase(False, "broadcast", num_bytes, itemsize, of_place)]
    if operation == "reduce_scatter" and sums and even:
        return [
            Phase(False, "reduce_scatter", num_bytes, itemsize),
            Phase(True, "reduce_scatter", part * wide, wide),
        ]
    if operation == "all_gather" and even:
        return [
            Phase(True, "all_gather", part * itemsize, itemsize),
            Phase(False, "all_gather", num_bytes, itemsize),
        ]
    return None


def sent_over_nodes(operation: str, num_bytes: int, nodes: tuple[int, int], rank: int) -> int:
    """Return the bytes that coordinate `rank` sends by `messages` on an axis of (ranks on each
    node, nodes), in two levels where it can.
    """
    (near, far), (node, place) = nodes, divmod(rank, nodes[0])
    found = phases(operation, num_bytes, (place, near), (node, far), itemsize=1, narrow=False)
    if found is None:
        return sent_bytes(operation, num_bytes, near * far, rank)
    ends = {False: (near, place), True: (far, node)}
    return sum(sent_bytes(each.operation, each.num_bytes, *ends[each.far]) for each in found)
