"""What is started on an axis, and what is made for it: communicators, shared memory, or neither.

    nothing                        neither: the axis is coordinates only, like `dp` and `pp`, whose
                                   ranks meet on other axes
    any operation                  a communicator
    two phases, by `collectives`   a second one, of all_reduce and reduce: each phase is matched for
                                   itself, see comm/transports/mpi_collectives.py
    what reads the others' memory  a window, if the ranks share a node, by `shared`, and by `auto`
                                   if buffers can be large enough

An axis of one rank needs nothing, and may be given any operation. To make a communicator or a
window is collective and blocks: within a step one rank would wait there, another for its message.
So it is said before, alike on all ranks, what an axis is for.
"""

from typing import NamedTuple

HEADER = 4096  # bytes of a window; the two counters lie on cache lines of their own
SLOT = 1 << 20  # bytes of one of its two slots
WINDOW = HEADER + 2 * SLOT  # bytes of a rank
AUTO_SHARED = 1 << 15  # bytes from which the window beats messages: benchmarks/collectives.py
# of which each node sends a part only
SUMS_AND_GATHERS = frozenset({"all_reduce", "reduce_scatter", "all_gather", "reduce"})
# by transport `shared`; the others are messages there
READING = SUMS_AND_GATHERS | {"broadcast", "gather", "scatter"}
TWO_PHASES = frozenset({"all_reduce", "reduce"})


class AxisOperations(NamedTuple):
    """What is started on an axis.

    most_bytes: of the largest buffer, if that is known to be small; only speed depends on it.
    heard: a tap hears what is started.
    """

    operations: frozenset[str]
    most_bytes: int | None = None
    heard: bool = True

    def needs_second(self, transport: str) -> bool:
        """Tell whether an axis of several ranks needs a second communicator."""
        return transport == "collectives" and bool(TWO_PHASES & self.operations)

    def needs_window(self, transport: str) -> bool:
        """Tell whether an axis of several ranks of one node needs a window."""
        large = self.most_bytes is None or self.most_bytes >= AUTO_SHARED
        return bool(self.operations & READING) and (transport == "shared" or (transport == "auto" and large))

    def combined(self, other: "AxisOperations") -> "AxisOperations":
        """Return what carries both."""
        if not (self.operations and other.operations):
            return self if self.operations else other
        operations = self.operations | other.operations
        if self.most_bytes is None or other.most_bytes is None:
            return AxisOperations(operations)
        return AxisOperations(operations, max(self.most_bytes, other.most_bytes))

    def allows(self, operation: str, size: int) -> bool:
        """Tell whether an operation may be started on an axis of `size` ranks."""
        return size == 1 or operation in self.operations


def carried(*operations: str, most_bytes: int | None = None) -> AxisOperations:
    """Return what carries these operations."""
    return AxisOperations(frozenset(operations), most_bytes)


NOTHING = carried()
LINKS = ("send", "receive")  # what comm/links.py starts
EVERYTHING = carried(*READING, "all_to_all", "all_to_all_v", "shift", "barrier", *LINKS)
