"""Play all ranks with times: when does each instruction start and end, who waits, how much memory is held?

A rank has one compute resource, one for sending and one for receiving. An instruction starts when the one before it on its rank has
ended, and a receive ends when its message has arrived. A send ends at once and starts a transfer:

    sender     |--F--|                                   leaves when the sender's link is free of earlier messages
                     |--latency--|--transfer--|          `transfer` occupies the sender at the start and the receiver at the end
    receiver                                  |--F--|

Times are only added and compared: give integers or fractions, and results are exact.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import COMPUTE, RECEIVES, SENDS, Action
from mpitrain.schedules.lower import with_messages
from mpitrain.schedules.needs import Programs, partner
from mpitrain.schedules.options import UNIT_TIMES, Times
from mpitrain.schedules.table import Table

Cost = Callable[[Action], float]  # time of an instruction on its rank
UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}  # by kind; what is absent takes no time


class Link(NamedTuple):
    """Time of one message between neighbouring stages: alpha, and bytes times beta."""

    latency: float = 0
    transfer: float = 0


AT_ONCE = Link()


@dataclass
class Timeline:
    """When each instruction of each rank started and ended. Waiting counts as part of a receive.

    exposed: per rank, the time it waited for messages that had been sent: the rest of its waiting is the schedule's own.
    """

    programs: Programs
    starts: list[list[float]]
    ends: list[list[float]]
    exposed: list[float] = field(default_factory=list)

    @property
    def makespan(self) -> float:
        """From time 0 to the last end: what a step that ends with a barrier costs."""
        return max((ends[-1] for ends in self.ends if ends), default=0)

    @property
    def span(self) -> float:
        """The longest time from a rank's first computation to its last one's end: the zero-bubble papers' cost (arXiv:2401.10241, 5.3)."""
        return max((last - first for first, last in map(self._computing, range(len(self.programs)))), default=0)

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

    def bubble_rate(self) -> float:
        """Return (span - ideal) / span, ideal being the longest time a rank computes (arXiv:2401.10241, 5.3)."""
        ideal = max(map(self.busy, range(len(self.programs))), default=0)
        return float((self.span - ideal) / self.span) if self.span else 0.0

    def computations(self, rank: int) -> list[tuple[Action, float, float]]:
        """Return (action, start, end) of what a rank computes, in order."""
        row = zip(self.programs[rank], self.starts[rank], self.ends[rank])
        return [(action, start, end) for action, start, end in row if action.kind in COMPUTE]

    def in_flight(self, rank: int) -> list[tuple[float, int]]:
        """Return (time, stashes held from then on) of a rank: one more at each forward's start, one less when B or W has ended."""
        last_part = {action[:3]: action for action in self.programs[rank] if action.kind in ("B", "W")}
        held, curve = 0, []
        for action, start, end in self.computations(rank):
            if action.kind == "F":
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


def simulate(schedule: Table | Programs, cost: Cost | Mapping[str, float] | None = None, link: Link = AT_ONCE) -> Timeline:
    """Play a schedule and return its Timeline.

    schedule: a table, whose messages are then added, or the lowered programs of all ranks.
    cost: time of each instruction, or of each kind; absent, F, I and W take 1 and B 2. A part takes its equal share of the whole.
    Raises ScheduleError if the programs can't be played to their end.
    """
    programs = with_messages(schedule) if isinstance(schedule, Table) else schedule
    return _Player(programs, cost if callable(cost) else _by_kind(programs, cost or UNIT), link).play()


def simulate_table(table: Table, times: Times = UNIT_TIMES) -> Timeline:
    """Play a table whose times are given for a rank's whole share of layers, and so divided by its stages of one copy.

    The message time is a latency: messages don't wait for one another.
    """
    share = max(map(len, table.chunks)) * table.segments / table.copies
    share = int(share) if share == int(share) else share
    forward, grad, weight = (time if share == 1 else time / share for time in times[:3])
    return simulate(table, {"F": forward, "B": grad + weight, "I": grad, "W": weight}, Link(times.message))


def _by_kind(programs: Programs, durations: Mapping[str, float]) -> Cost:
    """Return the cost by kind; the parts of a backward share its time."""
    num_parts: dict[tuple, int] = {}
    for program in programs:
        for action in program:
            if action.part is not None:
                num_parts[action[:3]] = max(num_parts.get(action[:3], 0), action.part + 1)

    def cost(action: Action) -> float:
        whole = durations.get(action.kind, 0)
        return whole if action.part is None else whole / num_parts[action[:3]]

    return cost


class _Player:
    """Plays ranks in the order of time, so that messages queue in the order they are sent."""

    def __init__(self, programs: Programs, cost: Cost, link: Link):
        self.programs, self.cost, self.link = programs, cost, link
        ranks = range(len(programs))
        self.timeline = Timeline(programs, [[] for _ in ranks], [[] for _ in ranks], [0] * len(programs))
        self.cursors = [0] * len(programs)
        self.sender_free: list[float] = [0] * len(programs)
        self.receiver_free: list[float] = [0] * len(programs)
        self.rank_of = {action.stage: rank for rank, program in enumerate(programs) for action in program if action.kind in COMPUTE}
        self.messages: dict[tuple, tuple[float, float]] = {}  # by the receive: (sent, arrived)
        self.waiting: dict[tuple, tuple[int, float]] = {}  # by the receive: (rank, since)
        self.ready: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def play(self) -> Timeline:
        while self.ready:
            time, rank = heappop(self.ready)
            self._run(rank, time)
        for rank, program in enumerate(self.programs):
            if self.cursors[rank] < len(program):
                position = self.cursors[rank]
                raise ScheduleError(f"rank {rank}, position {position}: {program[position]} can never start")
        return self.timeline

    def _run(self, rank: int, time: float) -> None:
        """Run a rank's instructions until it computes or waits."""
        program, starts, ends = self.programs[rank], self.timeline.starts[rank], self.timeline.ends[rank]
        for position in range(self.cursors[rank], len(program)):
            action = program[position]
            start = time
            if action.kind in RECEIVES:
                if action not in self.messages:
                    self.waiting[action] = rank, time
                    self.cursors[rank] = position
                    return
                sent, arrived = self.messages.pop(action)
                if arrived > time:
                    self.timeline.exposed[rank] += arrived - max(sent, time)
                    time = arrived
            elif action.kind in SENDS:
                self._send(action, rank, time)
            else:
                time = start + self.cost(action)
            starts.append(start)
            ends.append(time)
            if time > start:
                self.cursors[rank] = position + 1
                heappush(self.ready, (time, rank))
                return
        self.cursors[rank] = len(program)

    def _send(self, action: Action, rank: int, time: float) -> None:
        receive = partner(action)
        to = self.rank_of.get(receive.stage, rank)  # nobody's message goes nowhere
        latency, transfer = self.link
        leaves = max(time, self.sender_free[rank])
        self.sender_free[rank] = leaves + transfer
        arrives = max(leaves + latency, self.receiver_free[to])
        self.receiver_free[to] = arrives + transfer
        self.messages[receive] = time, arrives + transfer
        if receive in self.waiting:
            waiting_rank, since = self.waiting.pop(receive)
            heappush(self.ready, (since, waiting_rank))
