"""The sum of one bucket over data ranks that have several subtrees of it each.

Ranks exchange the shards of all subtrees and add those of their own shard as the tree says
(plan/division/batch_division.py). A rank with fewer sends its last again, which nobody reads.
"""

import torch

from mpitrain.comm.collectives import all_to_all
from mpitrain.parallel.zero.tree_accumulation import TreeGradient
from mpitrain.plan.division.batch_division import SubtreeSums


class SubtreeReduction:
    """It is under way, as `_Reduction` in actor/reductions.py. num_bytes: of what arrives."""

    def __init__(self, gradient: TreeGradient):
        self._gradient = gradient
        self._zero_group = zero_group = gradient.zero_group
        self._sent = sent = gradient.take_subtrees()
        number = zero_group.division.most_subtrees
        self._received = [torch.empty_like(sent[0]) for _ in range(number)]
        self.num_bytes = sum(received.nbytes for received in self._received)
        axis = zero_group.shard
        self._exchanges = [
            all_to_all(sent[min(at, len(sent) - 1)], axis, received)
            for at, received in enumerate(self._received)
        ]

    @property
    def scattered(self) -> bool:
        """Whether all shards have arrived."""
        return all(exchange.done for exchange in self._exchanges)

    def start_summing(self) -> None:
        """Sum, unless that is done; wait for the shards."""
        if not self._exchanges:
            return
        for exchange in self._exchanges:
            exchange.wait()
        self._exchanges = []
        self._gradient.shard.copy_(self._sum())
        self._received = []

    def _sum(self) -> torch.Tensor:
        """Return the sum of all subtrees of this rank's shard, in memory that arrived."""
        division, size = self._zero_group.division, self._zero_group.size
        shards = [received.view(size, -1) for received in self._received]
        sums = SubtreeSums(torch.Tensor.add_)
        for rank in range(size):
            for at, subtree in enumerate(division.run(rank).subtrees):
                sums.add(subtree, shards[at][rank])
        (total,) = sums.sums
        return total

    def wait(self) -> None:
        """Wait for the sum, and give the buffers back."""
        self.start_summing()
        for subtree in self._sent:
            self._zero_group.gradients.give_back(subtree)
        self._sent = []
