"""Gradient accumulation in one tree: the same bits for every division of microbatches over ranks.

That is `numerics.reproducible = "layout"`.

The slots of a step are its microbatches, in the order of its sequences; a data-parallel rank has a
run of them. Their number is odd * 2**k: groups of `odd` neighbours are summed one after the other,
then pairs of groups, then pairs of pairs. With dp = 1, 2, 4 ... 2**k each rank computes whole
subtrees, and the sum over ranks (comm/base/buffers.py) is the rest of the same tree:

    6 slots, odd = 3  ((0 + 1) + 2)  +  ((3 + 4) + 5)  dp = 1: all here
                                                       dp = 2: the outer sum is that over ranks

A rank holds a buffer for each group it is adding to, and one for each subtree that waits for its
neighbour: k of them at most.
"""

import torch

from mpitrain.parallel.zero.shards import Gradient


class TreeGradient(Gradient):
    """A gradient whose microbatches are summed in the tree; the last sum becomes `whole`."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._groups: dict[int, torch.Tensor] = {}
        # (level, sum of 2**level groups), the earliest first
        self._sums: list[tuple[int, torch.Tensor]] = []

    def zero(self) -> None:
        """Start a step; every buffer is zeroed when it is taken."""

    def holds(self, group: int) -> bool:
        return group in self._groups

    def hold(self, group: int) -> None:
        """Have a zeroed buffer for a group, and let the parameters look at it."""
        if group not in self._groups:
            self._groups[group] = self.zero_group.gradients.borrow(self.layout.length)
            self._groups[group].zero_()
        self._look_at(self._groups[group])

    def complete(self, group: int) -> None:
        """Add a group, to which everything has been added, to its neighbours.

        Groups are completed in ascending order.
        """
        total = self._groups.pop(group)
        level = 0
        while self._sums and self._sums[-1][0] == level:
            _, earlier = self._sums.pop()
            earlier += total
            self.zero_group.gradients.give_back(total)
            total = earlier
            level = level + 1
        self._sums.append((level, total))

    def finish(self) -> None:
        """Make the sum of all groups the gradient of the step."""
        ((_, total),) = self._sums
        self._sums = []
        if self.whole is None:
            self.whole = total
        else:
            self.whole.copy_(total)
            self.zero_group.gradients.give_back(total)
