"""What communication cost: of each step on this rank, for metrics.jsonl; of all steps on all ranks, as a table at the end of a run.

Axes are those of comm/mesh.py, and what is counted is told in comm/account.py. Ranks differ, pipeline ranks most: the lines of
metrics.jsonl are rank 0's, since asking all ranks would cost every step a message; the table has them all.
"""

from collections.abc import Iterable

from mpitrain.comm.account import Usage
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World
from mpitrain.layout.text import aligned, megabytes

HEADER = ("axis", "calls", "MB sent", "blocked ms", "worst rank", "overlapped ms", "hidden")


class Ledger:
    """The communication of this rank, step by step. The first step isn't in the table: it is never typical."""

    def __init__(self, mesh: Mesh):
        self._mesh, self._before = mesh, mesh.usage()
        self._totals: dict[str, Usage] = {}
        self._num_steps = -1

    def begin(self) -> None:
        """A step begins: what happened since the last one (validation, checkpoints) is nobody's."""
        self._before = self._mesh.usage()

    def end(self) -> dict[str, dict[str, float]]:
        """A step is over: return what each axis with traffic cost it, as metrics.jsonl shows it."""
        now = self._mesh.usage()
        step = {name: used.minus(self._before[name]) for name, used in now.items() if used != self._before[name]}
        self._num_steps += 1
        if self._num_steps:
            self._totals |= {name: self._totals.get(name, Usage()).plus(used) for name, used in step.items()}
        return {
            name: {"calls": u.calls, "bytes": u.num_bytes, "blocked_s": u.blocked_s, "overlapped_s": u.overlapped_s}
            for name, u in step.items()
        }

    def table(self, world: World) -> str:
        """Return the table of all ranks on rank 0, and nothing on the others or if there is nothing to tell. Collective."""
        every = world.gather("what communication cost", self._totals)
        if every is None or self._num_steps < 1 or not any(every):
            return ""
        names = [name for name in self._mesh.axes if any(name in totals for totals in every)]
        rows = [_row(name, [totals.get(name) for totals in every], self._num_steps) for name in names]
        return f"communication, a step and rank (mean of {self._num_steps} steps):\n{aligned([HEADER, *rows])}"


def _row(name: str, by_rank: list[Usage | None], num_steps: int) -> tuple[str, ...]:
    """Return a line of the table: means over the ranks that used the axis, and the rank that was blocked longest."""
    used = {rank: usage for rank, usage in enumerate(by_rank) if usage is not None}
    total, per = sum_of(used.values()), len(used) * num_steps
    worst = max(used, key=lambda rank: used[rank].blocked_s)
    hidden = total.overlapped_s / total.in_flight_s if total.in_flight_s else 0.0
    return (
        name,
        f"{total.calls / per:.0f}",
        megabytes(total.num_bytes / per),
        f"{total.blocked_s / per * 1e3:.1f}",
        f"{used[worst].blocked_s / num_steps * 1e3:.1f} ({worst})",
        f"{total.overlapped_s / per * 1e3:.1f}",
        f"{hidden:.0%}",
    )


def sum_of(usages: Iterable[Usage]) -> Usage:
    """Return the sum."""
    total = Usage()
    for usage in usages:
        total = total.plus(usage)
    return total
