"""Which microbatches of a step each data rank computes, and the tree in which gradients are summed.

That is `numerics.reproducible = "layout"`; otherwise all data ranks have as many, without a tree.

Microbatches are leaves of a tree that only their number shapes, odd * 2**k: `odd` neighbours, a
group, are added to one buffer one after another, then pairs of groups are summed, then pairs of
pairs. A data rank has a run of groups, and sums the subtrees that are whole in it. The sum over
ranks is the rest of the same tree:

    8 leaves   ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))
    4 ranks      0 1     2 3          4 5     6 7         one subtree each
    3 ranks      0 1 | 2       3   4 5   | 6 7            two, two and one

Where ranks have unequal numbers, all run the program of the longest run: the last microbatches of
the others are empty. Nothing is computed for them, and their messages carry nothing of use.
"""

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from mpitrain.config import Config

Sum = TypeVar("Sum")

# subtrees of equal size for each data rank that aren't cut; fewer make runs too unequal
UNCUT = 4


class TreeRun(NamedTuple):
    """The microbatches of one data rank, leaves of a tree whose groups have `odd` of them."""

    leaves: range
    odd: int

    def is_empty(self, index: int) -> bool:
        """Return whether the rank's microbatch `index` is an empty one."""
        return index >= len(self.leaves)

    def group_of(self, index: int) -> range:
        """Return the leaves that are added to one buffer with this rank's microbatch `index`."""
        begin = self.leaves.start + index - index % self.odd
        return range(begin, begin + self.odd)

    @property
    def subtrees(self) -> list[range]:
        """The leaves of each subtree that the rank sums, and whose sums it sends."""
        return self._summed()[0]

    @property
    def most_held(self) -> int:
        """The most sums that the rank holds at once, with the one that is added to."""
        return self._summed()[1]

    def _summed(self) -> tuple[list[range], int]:
        sums, most = SubtreeSums[None](lambda earlier, later: None), 0
        for group in dict.fromkeys(map(self.group_of, range(len(self.leaves)))):
            most = max(most, len(sums.subtrees) + 1)
            sums.add(group, None)
        return sums.subtrees, most


class SubtreeSums(Generic[Sum]):
    """Sums of subtrees that wait for their neighbours, in ascending order.

    join: adds a later sum to the one before it, and returns that.
    """

    def __init__(self, join: Callable[[Sum, Sum], Sum]):
        self._join = join
        self.subtrees: list[range] = []
        self.sums: list[Sum] = []

    def add(self, subtree: range, total: Sum) -> None:
        """Add the sum of the next subtree to those of its neighbours."""
        while self.subtrees and _are_siblings(self.subtrees[-1], subtree):
            subtree = range(self.subtrees.pop().start, subtree.stop)
            total = self._join(self.sums.pop(), total)
        self.subtrees.append(subtree)
        self.sums.append(total)


def _are_siblings(one: range, other: range) -> bool:
    return len(one) == len(other) and one.start % (2 * len(one)) == 0


class BatchDivision(NamedTuple):
    """How many microbatches a step has, and data ranks. in_tree: gradients are summed in a tree."""

    num_microbatches: int
    num_ranks: int
    in_tree: bool

    @property
    def is_even(self) -> bool:
        """Whether all ranks have as many, and one subtree each if there is a tree."""
        power_of_2 = self.num_ranks & (self.num_ranks - 1) == 0
        return not self.in_tree or (self.num_microbatches % self.num_ranks == 0 and power_of_2)

    @property
    def is_possible(self) -> bool:
        """Whether each rank has a microbatch, and as many as the others or whole groups."""
        if self.in_tree:
            return self.num_groups >= self.num_ranks
        return self.num_microbatches > 0 and self.num_microbatches % self.num_ranks == 0

    @property
    def num_groups(self) -> int:
        return self.num_microbatches // odd_part(self.num_microbatches) if self.num_microbatches else 0

    @property
    def longest(self) -> int:
        """The microbatches of the longest run."""
        return -(-self._num_units // self.num_ranks) * self._unit

    @property
    def numbers(self) -> str:
        """How many microbatches a rank has: "2", or "2 to 3"."""
        least = len(self.run(self.num_ranks - 1).leaves)
        return f"{least} to {self.longest}" if least < self.longest else str(least)

    @property
    def most_subtrees(self) -> int:
        """The most subtrees that a rank sums."""
        return 1 if self.is_even else max(len(self.run(rank).subtrees) for rank in range(self.num_ranks))

    @property
    def rank_of_most_sums(self) -> int:
        """The first rank that holds most sums at once."""
        ranks = range(1 if self.is_even else self.num_ranks)
        return max(ranks, key=lambda rank: self.run(rank).most_held)

    def run(self, rank: int) -> TreeRun:
        """Return the microbatches of a data rank: as many as the others, up to a group."""
        units, longer = divmod(self._num_units, self.num_ranks)
        begin, end = (self._unit * (units * at + min(at, longer)) for at in (rank, rank + 1))
        return TreeRun(range(begin, end), odd_part(self.num_microbatches))

    @property
    def _unit(self) -> int:
        """The leaves of the subtrees that aren't cut: the largest that runs can be made of."""
        if self.is_even:
            return 1
        enough = max(1, self.num_groups // (UNCUT * self.num_ranks))
        return odd_part(self.num_microbatches) << enough.bit_length() - 1

    @property
    def _num_units(self) -> int:
        return self.num_microbatches // self._unit


def division_of(config: Config, num_sequences: int = 0) -> BatchDivision:
    """Return how a step's microbatches, of all copies of the model, are divided over data ranks.

    num_sequences: of the step; 0: batch.global.
    """
    number = (num_sequences or config.batch.global_) // config.batch.micro
    return BatchDivision(number, config.parallel.dp, config.numerics.reproducible == "layout")


def sequences_of(config: Config, dp_rank: int, num_sequences: int = 0) -> range:
    """Return which sequences of a step a data rank has."""
    leaves = division_of(config, num_sequences).run(dp_rank).leaves
    return range(leaves.start * config.batch.micro, leaves.stop * config.batch.micro)


def round_of(config: Config, num_ranks: int) -> int:
    """Return a number of microbatches of which every multiple can be divided over data ranks."""
    return 1 << (num_ranks - 1).bit_length() if config.numerics.reproducible == "layout" else num_ranks


def odd_part(number: int) -> int:
    """Return the largest odd divisor."""
    return number // (number & -number)
