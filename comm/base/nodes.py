"""Topology: how the ranks of an axis lie on nodes. Integers only: no MPI."""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple


class Nodes(NamedTuple):
    """How the ranks of an axis lie on nodes: as many neighbours on each."""

    num_near: int
    num_far: int

    @property
    def sums(self) -> bool:
        """Whether a sum has the same bits in two levels."""
        return not self.num_near & (self.num_near - 1)


def nodes_of(numbers: Sequence[int]) -> Nodes | None:
    """Return how an axis lies on nodes, by each rank's; None: on one, or not in even neighbours."""
    runs = [len(list(run)) for _, run in groupby(numbers)]
    even = len(set(runs)) == 1 and len(runs) == len(set(numbers))
    return Nodes(runs[0], len(runs)) if even and len(runs) > 1 and runs[0] > 1 else None
