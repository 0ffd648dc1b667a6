"""The ranks of a job, and how they lie on nodes."""

from typing import NamedTuple

STARTED, THERE_ARE = "mpirun started", "there are"


class JobRanks(NamedTuple):
    """So many ranks, on so many nodes.

    node_ranks: neighbours on each node, 0 if nodes differ. source: what a message says before their number.
    """

    size: int
    num_nodes: int = 1
    node_ranks: int = 0
    source: str = STARTED

    @classmethod
    def filling(cls, size: int, near: int) -> "JobRanks":
        """Return ranks that fill one node of `near` ranks after the other."""
        return cls(size, -(-size // near), min(size, near), THERE_ARE)

    @property
    def largest_node(self) -> int:
        """The ranks of a node; where nodes differ, the fewest that the largest one can have."""
        return self.node_ranks or -(-self.size // self.num_nodes)
