"""When each instruction of each rank started and ended, measured or not, and what follows."""

from dataclasses import dataclass, field
from functools import cached_property

from mpitrain.schedules.actions import COMPUTE, Action
from mpitrain.schedules.lowering.needs import Programs


@dataclass
class Timeline:
    """When each instruction of each rank started and ended. Waiting is part of a receive.

    exposed: per rank, the time it waited for messages that had been sent: the rest is the
    schedule's own.
    """

    programs: Programs
    starts: list[list[float]]
    ends: list[list[float]]
    exposed: list[float] = field(default_factory=list)

    @cached_property
    def makespan(self) -> float:
        """From time 0 to the last end: what a step that ends with a barrier costs."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def span(self) -> float:
        """The longest time of a rank from first start to last end (arXiv:2401.10241, 5.3)."""
        return max(
            (last - first for first, last in map(self._computing, range(len(self.programs)))), default=0
        )

    def busy(self, rank: int) -> float:
        """Return the time a rank computes."""
        return sum(end - start for action, start, end in self.computations(rank))

    def idle(self, rank: int) -> float:
        """Return the time of the makespan in which a rank doesn't compute: its bubble."""
        return self.makespan - self.busy(rank)

    @property
    def bubble(self) -> float:
        """The share of the makespan in which a rank computes nothing, averaged over ranks."""
        ranks = range(len(self.programs))
        return float(sum(map(self.idle, ranks)) / (self.makespan * len(ranks))) if self.makespan else 0.0

    def computations(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of what a rank computes, in order."""
        row = zip(self.programs[rank], self.starts[rank], self.ends[rank])
        return [(action, start, end) for action, start, end in row if action.kind in COMPUTE]

    def walks(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of what a rank computes; parts in a row are one."""
        walks: list[tuple[Action, float, float]] = []
        for action, start, end in self.computations(rank):
            if action.part and walks and walks[-1][0][:3] == action[:3]:
                start = walks.pop()[1]
            walks.append((action._replace(part=None), start, end))
        return walks

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return (time, stashes held from then on): from a forward's start until B or W has ended.

        What is recomputed counts from there.
        """
        again = {action[1:3] for action in self.programs[rank] if action.kind == "R"}
        last_part = {action[:3]: action for action in self.programs[rank] if action.kind in ("B", "W")}
        held = 0
        curve = []
        for action, start, end in self.computations(rank):
            if action.kind == ("R" if action[1:3] in again else "F") and not action.part:
                held += 1
                curve.append((start, held))
            elif last_part.get(action[:3]) == action:
                held -= 1
                curve.append((end, held))
        return curve

    def peak_in_flight(self, rank: int) -> int:
        """Return the most stashes a rank holds at once."""
        return max((held for _, held in self.in_flight(rank)), default=0)

    def _computing(self, rank: int) -> tuple[float, float]:
        row = self.computations(rank)
        return (row[0][1], row[-1][2]) if row else (0, 0)
