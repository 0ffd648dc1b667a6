"""Play all ranks with times: when does each instruction start and end, who waits, how much memory is held?

A rank has one compute resource and one for sending. An instruction starts when the one before it
on its rank has ended, and a receive ends when its message has arrived. A send ends at once and
starts a transfer:

    sender  |--F--|  leaves when the sender's link is free of earlier messages
                     |--latency--|--transfer--|  `transfer` occupies the sender at the start
    receiver                                  |--F--|

Messages of several senders don't wait for one another at a receiver, or a shorter computation could
make a step longer. What travels between data ranks takes no time. Times are only added and
compared: give integers or fractions, and results are exact.
"""

from collections.abc import Callable, Mapping, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import COMPUTE, OFFLOAD, RECEIVES, SENDS, Action
from mpitrain.schedules.lowering.messages import with_messages
from mpitrain.schedules.lowering.needs import Programs, partner
from mpitrain.schedules.options import UNIT_TIMES, StageTimes, Times
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.table import Table

Cost = Callable[[Action], float]  # time of an instruction on its rank
UNIT = {"F": 1, "B": 2, "I": 1, "W": 1, "R": 1}  # by kind; what is absent takes no time


class Link(NamedTuple):
    """Time of one message between neighbouring stages: alpha, and bytes times beta."""

    latency: float = 0
    transfer: float = 0


AT_ONCE = Link()


def simulate(
    schedule: Table | Programs, cost: Cost | Mapping[str, float] | None = None, link: Link = AT_ONCE
) -> Timeline:
    """Play a schedule; return its Timeline. Raises ScheduleError if it can't be played to its end.

    schedule: a table, whose messages are then added, or the lowered programs of all ranks.
    cost: time of each instruction, or of each kind; absent, F, I, W and R take 1 and B 2. A part
    takes its equal share of the whole.
    """
    programs = with_messages(schedule) if isinstance(schedule, Table) else schedule
    return _Player(programs, cost if callable(cost) else _by_kind(programs, cost or UNIT), link).play()


def simulate_table(
    table: Table,
    times: Times = UNIT_TIMES,
    stage_times: Sequence[StageTimes] | None = None,
    offload: float = 0,
) -> Timeline:
    """Play a table with times of a rank's whole share, divided by its stages, or of each stage.

    The message time is a latency: messages don't wait for one another. offload: the time to copy a
    rank's stash to host memory, or back; the computation beside it takes as long at least.
    """
    link = Link(times.message)
    if stage_times is not None:
        return simulate(table, _with_copies(table, _by_stage(table, stage_times), offload), link)
    share = max(map(len, table.chunks)) * table.segments / table.copies
    share = int(share) if share == int(share) else share
    forward, grad, weight = (time if share == 1 else time / share for time in times[:3])
    costs = {"F": forward, "B": grad + weight, "I": grad, "W": weight, "R": forward}
    return simulate(table, _with_copies(table, lambda action: costs.get(action.kind, 0), offload), link)


def _with_copies(table: Table, cost: Cost, offload: float) -> Cost:
    sent = {action[1:3] for row in table.ranks for action in row if action.kind == OFFLOAD}
    if not sent or not offload:
        return cost
    copy = offload * table.copies / max(map(len, table.chunks))

    def longer(action: Action) -> float:
        own = cost(action)
        return max(own, copy) if action.kind in ("F", "B", "I") and action[1:3] in sent else own

    return longer


def _by_stage(table: Table, stage_times: Sequence[StageTimes]) -> Cost:
    """Raises ScheduleError for another number of stages."""
    if len(stage_times) != table.depth:
        raise ScheduleError(
            f"{table.name}: found times of {counted(len(stage_times), 'stages')}, needed {table.depth}, "
            "as it has"
        )
    costs = {
        (kind, stage): time / table.segments
        for stage, (forward, grad, weight) in enumerate(stage_times)
        for kind, time in zip("FIWBR", (forward, grad, weight, grad + weight, forward))
    }

    def cost(action: Action) -> float:
        return 0 if action.kind not in COMPUTE else costs[action.kind, action.stage % table.depth]

    return cost


def _by_kind(programs: Programs, durations: Mapping[str, float]) -> Cost:
    num_parts: dict[tuple[str, int, int], int] = {}
    for program in programs:
        for action in program:
            if action.part is not None and action.kind in COMPUTE:
                num_parts[action[:3]] = max(num_parts.get(action[:3], 0), action.part + 1)

    def cost(action: Action) -> float:
        whole = durations.get(action.kind, 0)
        number = num_parts.get(action[:3], 1)
        return whole if number == 1 else whole / number

    return cost


class _Player:
    """Plays ranks in the order of time, so that messages queue in the order they are sent."""

    def __init__(self, programs: Programs, cost: Cost, link: Link):
        self.programs = programs
        self.cost = cost
        self.link = link
        ranks = range(len(programs))
        self.timeline = Timeline(programs, [[] for _ in ranks], [[] for _ in ranks], [0] * len(programs))
        self.cursors = [0] * len(programs)
        self.sender_free: list[float] = [0] * len(programs)
        self.messages: dict[Action, tuple[float, float]] = {}  # by the receive: (sent, arrived)
        self.waiting: dict[Action, tuple[int, float]] = {}  # by the receive: (rank, since)
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
        program = self.programs[rank]
        starts = self.timeline.starts[rank]
        ends = self.timeline.ends[rank]
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
        latency, transfer = self.link
        leaves = max(time, self.sender_free[rank])
        self.sender_free[rank] = leaves + transfer
        self.messages[receive] = time, leaves + latency + transfer
        if receive in self.waiting:
            waiting_rank, since = self.waiting.pop(receive)
            heappush(self.ready, (since, waiting_rank))
