"""Gradient accumulation in one tree: the same bits for every division of microbatches over ranks.

The tree, and what of it a rank sums, are in plan/division/batch_division.py:

    6 microbatches, groups of 3  ((0 + 1) + 2)  +  ((3 + 4) + 5)  dp = 1: all here
                                                                  dp = 2: the outer sum is that over ranks

A rank holds a buffer for each group it is adding to, and one for each subtree that waits for its
neighbour.
"""

import torch

from mpitrain.parallel.zero.shards import Gradient
from mpitrain.plan.division.batch_division import SubtreeSums


class TreeGradient(Gradient):
    """A gradient whose microbatches are summed in the tree.

    The last sum becomes `whole`, unless ranks sum several subtrees.
    """

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self._groups: dict[range, torch.Tensor] = {}
        self._sums = SubtreeSums(self._join)

    def zero(self) -> None:
        """Start a step; every buffer is zeroed when it is taken."""

    def holds(self, group: range) -> bool:
        return group in self._groups

    def hold(self, group: range) -> None:
        """Have a zeroed buffer for a group, and let the parameters look at it."""
        if group not in self._groups:
            self._groups[group] = self.zero_group.gradients.borrow(self.map.length)
            self._groups[group].zero_()
        self._look_at(self._groups[group])

    def complete(self, group: range) -> None:
        """Add a group, to which everything has been added, to its neighbours.

        Groups are completed in ascending order.
        """
        self._sums.add(group, self._groups.pop(group))

    def _join(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        earlier += later
        self.zero_group.gradients.give_back(later)
        return earlier

    def finish(self) -> None:
        """Make the sum of all groups the gradient of the step, unless there are several subtrees."""
        if not self.zero_group.division.is_even:
            return
        (total,) = self._take_sums()
        if self.whole is None:
            self.whole = total
        else:
            self.whole.copy_(total)
            self.zero_group.gradients.give_back(total)

    def take_subtrees(self) -> list[torch.Tensor]:
        """Let go of the sums of subtrees, which are to be given back when they were read."""
        self.drop()
        return self._take_sums()

    def _take_sums(self) -> list[torch.Tensor]:
        sums, self._sums = self._sums.sums, SubtreeSums(self._join)
        return sums
