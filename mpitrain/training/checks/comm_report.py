"""What communication cost: each step on rank 0 (metrics.jsonl); all ranks, in a table at the end.

What is counted stands in comm/meters/account.py. Asking all ranks would cost every step a message.
Of several ranks that are waited for at once each has its share (comm/progress.py).
"""

import os
from collections import Counter
from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.meters.account import AxisUsage
from mpitrain.errors import counted
from mpitrain.plan.axes import MEANINGS
from mpitrain.plan.declared.formatting import aligned, megabytes

MOST_PEERS = 3
HEADER = ("axis", "calls", "MB sent", "blocked ms", "worst rank", "overlapped ms", "hidden")


class RankUsage(NamedTuple):
    """Of a rank: its node, what each axis cost, and the ranks that it waited for longest, in seconds."""

    node: str
    totals: dict[str, AxisUsage]
    waits: list[tuple[int, float]]


class Ledger:
    """The communication of this rank by steps; the first, never typical, isn't in the table."""

    def __init__(self, mesh: Mesh):
        self._mesh = mesh
        self._totals: dict[str, AxisUsage] = {}
        self._waits = Counter[int]()  # seconds, by rank
        self._num_steps = -1
        self.begin()

    def begin(self) -> None:
        """Begin a step: what was sent since the last one (validation, checkpoints) counts for no step."""
        self._before = self._mesh.usage()
        self._waits_before = Counter(self._mesh.progress.waited_for())

    def waits(self) -> dict[str, float]:
        """Return the seconds of this step's longest waits for other ranks, by rank."""
        return {str(rank): seconds for rank, seconds in self._waited_for().most_common(MOST_PEERS)}

    def _waited_for(self) -> Counter[int]:
        return Counter(self._mesh.progress.waited_for()) - self._waits_before

    def end(self) -> dict[str, dict[str, float]]:
        """A step is over: return what each axis with traffic cost it, as metrics.jsonl shows it."""
        now = self._mesh.usage()
        changed = (name for name, used in now.items() if used != self._before[name])
        step = {name: now[name].minus(self._before[name]) for name in changed}
        self._num_steps += 1
        if self._num_steps:
            for name, used in step.items():
                self._totals[name] = self._totals.get(name, AxisUsage()).plus(used)
            self._waits.update(self._waited_for())
        return {
            name: {
                "calls": u.calls,  # operations
                "bytes": u.num_bytes,  # bytes that this rank sent, or read from others of its node
                "blocked_s": u.blocked_s,  # seconds of waiting, posting, copying and adding
                # seconds under way while the rank computed or waited for another axis
                "overlapped_s": u.overlapped_s,
            }
            for name, u in step.items()
        }

    @property
    def num_steps(self) -> int:
        """Steps that are in the table."""
        return max(0, self._num_steps)

    def gather(self, world: World) -> list[RankUsage]:
        """Return the totals of all ranks on rank 0, and nothing on the others. Collective."""
        mine = RankUsage(os.uname().nodename, self._totals, self._waits.most_common(MOST_PEERS))
        return world.gather("what communication cost", mine) or []

    def table(self, gathered: Sequence[RankUsage]) -> str:
        """Return the table of all ranks, or nothing if there is nothing to report."""
        if self._num_steps < 1 or not any(usage.totals for usage in gathered):
            return ""
        costs = axis_totals(gathered, self._num_steps)
        names = [name for name in self._mesh.axes if name in costs]
        rows = [_row(name, costs[name]) for name in names]
        steps = counted(self._num_steps, "steps")
        table = f"communication per step and rank (mean of {steps}):\n{aligned([HEADER, *rows])}"
        legend = [f"  {name}: {MEANINGS[name]}" for name in names if name in MEANINGS]
        return "\n".join([table, *legend, *_peers(gathered, self._num_steps)])


class AxisTotal(NamedTuple):
    """What an axis cost the ranks that use it.

    total: of all these ranks and steps, `count` times of a rank in a step.
    worst_rank: that was blocked longest, for worst_s in a step.
    """

    total: AxisUsage
    count: int
    worst_rank: int
    worst_s: float


def axis_totals(usages: Sequence[RankUsage], num_steps: int) -> dict[str, AxisTotal]:
    """Return what each axis cost, by its name. usages: of all ranks; num_steps: at least one."""
    costs = {}
    for name in dict.fromkeys(name for usage in usages for name in usage.totals):
        used = {rank: usage.totals[name] for rank, usage in enumerate(usages) if name in usage.totals}
        total = reduce(AxisUsage.plus, used.values(), AxisUsage())
        worst = max(used, key=lambda rank: used[rank].blocked_s)
        costs[name] = AxisTotal(total, len(used) * num_steps, worst, used[worst].blocked_s / num_steps)
    return costs


def _row(name: str, cost: AxisTotal) -> tuple[str, ...]:
    total, count, worst_rank, worst_s = cost
    hidden = total.overlapped_s / total.in_flight_s if total.in_flight_s else 0.0
    return (
        name,
        f"{total.calls / count:.0f}",
        megabytes(total.num_bytes / count),
        f"{total.blocked_s / count * 1e3:.1f}",
        f"{worst_s * 1e3:.1f} ({worst_rank})",
        f"{total.overlapped_s / count * 1e3:.1f}",
        f"{hidden:.0%}",
    )


def _peers(usages: Sequence[RankUsage], num_steps: int) -> list[str]:
    pairs = [(seconds, rank, peer) for rank, usage in enumerate(usages) for peer, seconds in usage.waits]
    texts = [
        f"rank {rank} for rank {peer} on {usages[peer].node} {seconds / num_steps * 1e3:.1f} ms"
        for seconds, rank, peer in sorted(pairs, reverse=True)[:MOST_PEERS]
    ]
    return [f"  longest waits: {', '.join(texts)}"] if texts else []
