"""What a rank holds for its messages.

Windows of shared memory, scratch for sums, and what travels between pipeline ranks.

window   of each axis within a node whose ranks read one another's memory
         (comm/base/axis_operations.py); each rank's part is its own
scratch  of an axis that sums by messages, or over several nodes (comm/transports/levels.py): of
         constant size, but for sums in one round, by MPI's collectives, and all-reduces of 16-bit
         numbers over nodes, which are added in fp32
copies   in 16 bits, of what is summed (rounded_copies.py)
links    two receives posted ahead, and one send
"""

import math
from collections.abc import Sequence

from mpitrain.comm.base.axis_operations import WINDOW
from mpitrain.comm.base.nodes import Nodes, nodes_of
from mpitrain.comm.base.wire import ROOM, round_of, sorting_bytes, under_way
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.domains import domains_of, itemsize_of_weights, itemsize_on_the_wire
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.bucket_buffers import buckets_of
from mpitrain.plan.predict.rounded_copies import TOGETHER, copies_sent

LINKS = 3  # activations or gradients of a microbatch under way
SORTED = 2  # rounds in which data is sorted by nodes at once (comm/base/sorting.py)


def message_bytes(plan: Plan, rank: int) -> int:
    """Return what a rank of a pipeline rank holds for messages."""
    narrow, _ = itemsizes_of(plan.config)
    links = LINKS * math.prod(plan.activation_shape()) * narrow if plan.config.parallel.pp > 1 else 0
    return _windows(plan) + _scratch(plan, rank) + copies_sent(plan, rank) + links


def _windows(plan: Plan) -> int:
    """Return the shared memory of a rank's own windows: within a node, or in its part of each node."""
    transport, ranks = plan.config.comm.transport, plan.axes.of(0)
    axes = [name for name, carried in plan.axes.carried.items() if carried.needs_window(transport)]
    shared = [ranks[name] for name in axes if len(ranks[name]) > 1]
    return WINDOW * sum(_on_one_node(plan, mine) or bool(_levels(plan, mine)) for mine in shared)


def _on_one_node(plan: Plan, ranks: Sequence[int]) -> bool:
    node = plan.config.comm.node_ranks
    return not node or len({rank // node for rank in ranks}) == 1


def _levels(plan: Plan, ranks: Sequence[int]) -> Nodes | None:
    """Return how the ranks lie on nodes, if data moves inside of nodes and between them in turn."""
    comm = plan.config.comm
    if not comm.node_ranks or comm.levels != "auto":
        return None
    return nodes_of([rank // comm.node_ranks for rank in ranks])


def _scratch(plan: Plan, rank: int) -> int:
    """Return the bytes in which sums arrive, and data is sorted by nodes, of the axes of data ranks."""
    total = 0
    ranks_of = plan.axes.of(0)
    buckets = buckets_of(plan, rank)
    for name, domain in domains_of(plan.config).items():
        mine = [bucket for bucket in buckets if bucket.plan.domain == name]
        lengths = sorted((bucket.weights.length for bucket in mine), reverse=True)
        longest = max((bucket.weights.length for bucket in mine if bucket.owned), default=0)
        summed = lengths[:TOGETHER]
        width = itemsize_on_the_wire(plan.config, name)
        shards, alike = (_Scratch(plan, ranks_of[axis], width) for axis in (domain.shard, domain.replicate))
        total += shards.scatter_bytes(summed) + shards.sorting_bytes_of_rounds(
            lengths[:1], longest, plan, name
        )
        total += alike.sum_bytes([length // domain.num_shards(plan.config) for length in summed])
    return total


class _Scratch:
    """What an axis holds besides its buffers, by the way its data goes.

    one level   of a sum, the copies of the own shard, as long as a bucket, but in rounds of
                constant size; on a node, the others' memory is read
    two levels  of a sum, a copy of the own shard from each neighbour, and of its part from each
                node; of a reduce-scatter and an all-gather, rounds sorted by nodes

    width: bytes of a number that is summed. Two-byte ones are widened within a node.
    """

    def __init__(self, plan: Plan, ranks: Sequence[int], width: int):
        self._reads = plan.config.comm.transport in ("auto", "shared")
        self._one_node = _on_one_node(plan, ranks)
        self._nodes = _levels(plan, ranks)
        self._width = width
        self._size = len(ranks)
        self._whole = plan.config.comm.transport == "collectives"

    def scatter_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes in which reduce-scatters of so many numbers arrive; over nodes, of two rounds."""
        if self._nodes is None or not self._nodes.sums:
            return self.sum_bytes(lengths)
        rounds = [min(length, self._size * round_of(self._size, self._width)) for length in lengths]
        return self._level_bytes(rounds[:SORTED], self._nodes)

    def sum_bytes(self, lengths: Sequence[int]) -> int:
        """Return the bytes in which sums of so many numbers arrive, and are added in fp32 over nodes."""
        if self._size == 1 or (self._one_node and self._reads):
            return 0
        if self._nodes is None or not self._nodes.sums:
            return self._arriving(lengths, self._size, self._width)
        near, far = self._nodes
        wide = sum(length // near + length // near // far for length in lengths) * 4
        return self._level_bytes(lengths, self._nodes) + (wide if self._width == 2 else 0)

    def _level_bytes(self, lengths: Sequence[int], nodes: Nodes) -> int:
        near, far = nodes
        here = 0 if self._reads and self._width != 2 else self._arriving(lengths, near, self._width)
        return here + self._arriving([length // near for length in lengths], far, max(self._width, 4))

    def _arriving(self, lengths: Sequence[int], size: int, width: int) -> int:
        """Return the bytes of sums on an axis of `size` ranks; MPI's collectives have a sum in one round."""
        message_bytes = [length * width for length in lengths]
        if self._whole:
            return sum(message_bytes)
        rounds = [under_way(num_bytes, size, width) for num_bytes in message_bytes]
        return min(sum(rounds), max(ROOM, *rounds)) if rounds else 0

    def sorting_bytes_of_rounds(self, summed: Sequence[int], gathered: int, plan: Plan, domain: str) -> int:
        """Return the bytes in which two rounds of what is reduced, or gathered, are sorted by nodes."""
        if self._size == 1 or self._nodes is None:
            return 0
        weights = itemsize_of_weights(plan.config, domain)
        needed = [sorting_bytes(gathered // self._size, self._nodes, weights, narrow=False, sums=False)]
        if self._nodes.sums:
            narrow = self._width == 2
            needed += [
                sorting_bytes(length // self._size, self._nodes, self._width, narrow=narrow, sums=True)
                for length in summed
            ]
        return SORTED * max(needed)
