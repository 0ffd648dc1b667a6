"""Which cores a process may use: not all that there are, where a batch system or a launcher binds it."""

import os


def of_this_process() -> frozenset[int]:
    """Return the numbers of the cores that this process may use; where a system doesn't say, all."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))
