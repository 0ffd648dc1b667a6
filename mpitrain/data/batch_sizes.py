"""The sequences of each step, where the batch grows (batch.growth)."""

from mpitrain.config import Batch


class BatchSizes:
    """How many sequences each step reads: a pure function of its number."""

    def __init__(self, batch: Batch):
        """batch: resolved; of a growing batch, the size of any step."""
        self.changes = batch.growth or ((1, batch.global_),)

    def at(self, step: int) -> int:
        """Return the sequences of a step, counted from 1."""
        return next(size for first, size in reversed(self.changes) if first <= step)

    def before(self, step: int) -> int:
        """Return the sequences of all steps before this one."""
        firsts = [first for first, _ in self.changes]
        lasts = [min(first, step) for first in [*firsts[1:], step]]
        pairs = zip(self.changes, lasts, strict=True)
        return sum(max(last - first, 0) * size for (first, size), last in pairs)

    def last_alike(self, step: int, steps: int) -> int:
        """Return the last step that has the size of this one, of a run of so many."""
        return min([first - 1 for first, _ in self.changes if first > step] + [steps])
