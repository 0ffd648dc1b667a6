"""What an operation makes a rank send: formulas, in integers; comm/meters/account.py counts.

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
by messages; `collectives` exchanges so. What the root sends there, others read, and vice versa.

In two levels (comm/transports/levels.py), m ranks on each of k nodes: the bytes of each phase by
the formulas for its axis. Of an all-reduce a node sends 2 N (k-1)/k across in all, in one level
2 N m (k-1)/k.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mpitrain.comm.base.axis_operations import AUTO_SHARED, READING
from mpitrain.comm.base.grid import split

LIMIT = 1 << 30  # bytes of one message: counts in MPI 3 are 32-bit, and Open MPI 5 has no others
ROUND = 1 << 24  # bytes of a round of a sum by messages: what all ranks send one of them
LEAST = 1 << 16  # bytes of a message in it, or more
ROUNDS = 2  # of a sum that are under way
ALIGNED = 64  # bytes: where arrays begin in memory that several share
ROOM = 4 * ROUND  # bytes of rounds that are under way on an axis, or those of one sum
WITH_ROOT = ("broadcast", "reduce", "gather", "scatter")
# bytes up to which an all-reduce of `messages` gathers all everywhere: one phase, log2(size) messages
SMALL = 1 << 13


def pieces(num_bytes: int) -> list[slice]:
    """Return the pieces of at most LIMIT bytes that a part is sent in; one even of no bytes."""
    return [slice(at, at + LIMIT) for at in range(0, max(num_bytes, 1), LIMIT)]


def round_of(size: int, itemsize: int) -> int:
    """Return the elements of each rank's part that are summed in a round, on an axis of `size` ranks."""
    return max(ROUND // size, LEAST, itemsize) // itemsize


def rounds_of(length: int, size: int, itemsize: int) -> list[slice]:
    """Return the elements of a part that each round has, of `length` elements in all: alike on all ranks."""
    step = round_of(size, itemsize)
    longest = -(-length // size)
    return [slice(at, at + step) for at in range(0, max(longest, 1), step)]


def sorted_rounds(share: int, size: int, itemsize: int) -> list[slice]:
    """Return the elements of each rank's share that are sorted by nodes at once: alike on all ranks."""
    step = round_of(size, itemsize)
    return [slice(at, min(at + step, share)) for at in range(0, max(share, 1), step)]


def sorting_bytes(share: int, nodes: tuple[int, int], itemsize: int, *, narrow: bool, sums: bool) -> int:
    """Return the bytes of a round of a reduce-scatter (sums) or an all-gather in two levels.

    share: elements of each rank.  nodes: (ranks on each node, nodes).  narrow: as in phases().
    """
    near, far = nodes
    length = min(share, round_of(near * far, itemsize))
    parts = [near * far * length * itemsize]
    if sums:
        parts.append(far * length * (4 if narrow else itemsize))
    if sums and narrow:
        parts.append(length * 4)
    return sum(-(-part // ALIGNED) * ALIGNED for part in parts)


def under_way(num_bytes: int, size: int, itemsize: int) -> int:
    """Return the bytes in which the parts of a sum of `num_bytes` arrive at once."""
    return min(num_bytes, ROUNDS * size * round_of(size, itemsize) * itemsize)


def transport_on_a_node(wanted: str, operation: str, num_bytes: int) -> str:
    """Return the transport of an operation on host buffers in a node, as Axis.by_size() does.

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
    """Return the bytes that coordinate `rank` of an axis sends, or reads, for so large a buffer.

    itemsize: bytes per element, which no shard divides.  root: of an operation that has one.
    """
    return sum(_parts(operation, num_bytes, size, rank, itemsize, root, transport))


def _children(size: int, place: int) -> int:
    """Return to how many ranks the one at a place of a broadcast's tree sends; the root's is 0."""
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
    in_rounds: bool = True,
) -> int:
    """Return how many messages coordinate `rank` of an axis sends for a buffer of `num_bytes`.

    None has more than LIMIT bytes, but of MPI's collectives: one to each other rank is counted.
    in_rounds: whether sums go in rounds, as those of host buffers do.
    """
    if size == 1 or operation == "receive" or (transport == "shared" and operation in READING):
        return 0
    if transport == "collectives" and operation in (*WITH_ROOT, *READING, "shift"):
        return _sent_by_mpi(operation, size, is_root=rank == root)
    length = num_bytes // itemsize
    parts = _parts(operation, num_bytes, size, rank, itemsize, root, "messages")
    # the first so many
    of_sum = size - 1 if in_rounds and _sums_in_parts(operation, num_bytes) else 0
    rounds = rounds_of(length, size, itemsize)
    in_round = [len(range(part // itemsize)[piece]) * itemsize for part in parts[:of_sum] for piece in rounds]
    return sum(len(pieces(part)) for part in (*in_round, *parts[of_sum:]))


def _sent_by_mpi(operation: str, size: int, *, is_root: bool) -> int:
    """Return how many messages a rank sends at least in one of MPI's collectives."""
    if operation in WITH_ROOT:
        to_root = int(not is_root)
        return {"gather": to_root, "reduce": size - 1 + to_root}.get(operation, (size - 1) * is_root)
    return (size - 1) * (2 if operation == "all_reduce" else 1)


def _sums_in_parts(operation: str, num_bytes: int) -> bool:
    return operation == "reduce_scatter" or (operation in ("all_reduce", "reduce") and num_bytes > SMALL)


def _parts(
    operation: str, num_bytes: int, size: int, rank: int, itemsize: int, root: int, transport: str
) -> list[int]:
    """Return the bytes of each part that a rank sends, or reads; of an all_to_all_v, if equal."""
    if size == 1 or operation == "receive":
        return []
    if operation in ("send", "shift"):
        return [num_bytes]
    small = transport == "messages" and num_bytes <= SMALL
    if operation == "barrier" or (operation == "all_reduce" and small):
        return [num_bytes * min(1 << k, size - (1 << k)) for k in range((size - 1).bit_length())]
    if operation == "all_to_all":
        return [num_bytes // size] * (size - 1)
    if operation == "all_to_all_v":
        return _lengths(num_bytes, size - 1)
    is_root = rank == root
    if operation == "broadcast":
        counts = {"messages": _children(size, (rank - root) % size), "shared": int(not is_root)}
        return [num_bytes] * counts.get(transport, (size - 1) * is_root)
    if operation == "reduce" and small:
        return [num_bytes] * (not is_root)
    shards = [length * itemsize for length in _lengths(num_bytes // itemsize, size)]
    return _shards_sent(operation, shards, rank, is_root, transport)


def _shards_sent(operation: str, shards: list[int], rank: int, is_root: bool, transport: str) -> list[int]:
    to_reduce, to_gather = shards[:rank] + shards[rank + 1 :], [shards[rank]] * (len(shards) - 1)
    to_root, from_root = [shards[rank]] * (not is_root), to_reduce * is_root
    if transport == "shared":  # what others send, it reads
        to_reduce, to_gather, to_root, from_root = to_gather, to_reduce, from_root, to_root
    return {
        "reduce_scatter": to_reduce,
        "all_gather": to_gather,
        "all_reduce": to_reduce + to_gather,
        "gather": to_root,
        "scatter": from_root,
        "reduce": to_reduce + to_root,
    }[operation]


def _lengths(length: int, size: int) -> list[int]:
    bounds = split(length, size)
    return [end - begin for begin, end in zip(bounds, bounds[1:])]


class Phase(NamedTuple):
    """One phase of an operation in two levels. far: over nodes.  root: on its axis.

    itemsize: of an element of its buffer.
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
    levels = _TwoLevels(num_bytes, near, far, itemsize, narrow, root)
    in_levels = _IN_TWO_LEVELS.get(operation)
    return None if in_levels is None else in_levels(levels)


@dataclass(frozen=True)
class _TwoLevels:
    """A buffer, and this rank, as in phases(); methods return the phases of their name, or None."""

    num_bytes: int
    near: tuple[int, int]
    far: tuple[int, int]
    itemsize: int
    narrow: bool
    root: int

    def all_reduce(self) -> list[Phase] | None:
        if not self._sums:
            return None
        if self.num_bytes <= SMALL:
            both = [Phase(far, "all_reduce", self.num_bytes, self.itemsize) for far in (False, True)]
            return None if self.narrow else both
        return [
            self._within("reduce_scatter"),
            self._summed_across("reduce_scatter"),
            Phase(True, "all_gather", self._shard_length * self.itemsize, self.itemsize),
            self._within("all_gather"),
        ]

    def reduce(self) -> list[Phase] | None:
        if not self._sums or self.num_bytes <= SMALL:
            return None
        node, place = self._node_and_place_of_root
        to_node = [self._within("reduce_scatter"), self._summed_across("reduce", node)]
        return to_node + [self._within("gather", place)] * (self.far[0] == node)

    def broadcast(self) -> list[Phase]:
        node, place = self._node_and_place_of_root
        across = [Phase(True, "broadcast", self.num_bytes, self.itemsize, node)] * (self.near[0] == place)
        return [*across, self._within("broadcast", place)]

    def reduce_scatter(self) -> list[Phase] | None:
        if not self._sums or not self._even:
            return None
        return [phase for one_round in self._rounds() for phase in one_round._scattered()]

    def _scattered(self) -> tuple[Phase, Phase]:
        return self._within("reduce_scatter"), self._summed_across("reduce_scatter")

    def all_gather(self) -> list[Phase] | None:
        if not self._even:
            return None
        return [phase for one_round in self._rounds() for phase in one_round._gathered()]

    def _gathered(self) -> tuple[Phase, Phase]:
        across = Phase(True, "all_gather", self._shard_length * self.itemsize, self.itemsize)
        return across, self._within("all_gather")

    def _rounds(self) -> "list[_TwoLevels]":
        """Return what each round, in which so much of every share is sorted, has for a buffer."""
        size = self.near[1] * self.far[1]
        shares = sorted_rounds(self.num_bytes // self.itemsize // size, size, self.itemsize)
        return [replace(self, num_bytes=(at.stop - at.start) * size * self.itemsize) for at in shares]

    @property
    def _sums(self) -> bool:
        """Whether a node's sum is a branch of the tree in which one level sums."""
        num_near = self.near[1]
        return not num_near & (num_near - 1)

    @property
    def _even(self) -> bool:
        return self.num_bytes // self.itemsize % (self.near[1] * self.far[1]) == 0

    @property
    def _shard_length(self) -> int:
        place, num_near = self.near
        return _lengths(self.num_bytes // self.itemsize, num_near)[place]

    @property
    def _node_and_place_of_root(self) -> tuple[int, int]:
        return divmod(self.root, self.near[1])

    def _within(self, operation: str, root: int = 0) -> Phase:
        return Phase(False, operation, self.num_bytes, self.itemsize, root)

    def _summed_across(self, operation: str, root: int = 0) -> Phase:
        """Return a phase that sums the shard over nodes, 16-bit floats in fp32."""
        width = 4 if self.narrow else self.itemsize
        return Phase(True, operation, self._shard_length * width, width, root)


_IN_TWO_LEVELS: dict[str, Callable[[_TwoLevels], list[Phase] | None]] = {
    "all_reduce": _TwoLevels.all_reduce,
    "reduce": _TwoLevels.reduce,
    "broadcast": _TwoLevels.broadcast,
    "reduce_scatter": _TwoLevels.reduce_scatter,
    "all_gather": _TwoLevels.all_gather,
}


def sent_over_nodes(operation: str, num_bytes: int, nodes: tuple[int, int], rank: int) -> int:
    """Return the bytes that `rank` sends by `messages` on an axis of (ranks on each node, nodes).

    In two levels where it can.
    """
    (near, far), (node, place) = nodes, divmod(rank, nodes[0])
    levels = phases(operation, num_bytes, (place, near), (node, far), itemsize=1, narrow=False)
    if levels is None:
        return sent_bytes(operation, num_bytes, near * far, rank)
    ends = {False: (near, place), True: (far, node)}
    return sum(sent_bytes(phase.operation, phase.num_bytes, *ends[phase.far]) for phase in levels)
