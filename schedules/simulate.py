"""Play all ranks in one process: in which order actions can run, and when each starts."""

from collections.abc import Mapping
from fractions import Fraction

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import COMPUTE, SENDS, Action
from mpitrain.schedules.needs import Needs, Programs, partner

UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}  # ticks; everything else takes no time


def play(needs: Needs, *, blocking_sends: bool = False) -> tuple[list[tuple[int, Action]], list[int]]:
    """Run the programs until none can go on; return the (rank, action) in an order they ran, and each rank's cursor.

    Sends have rendezvous semantics, nothing is buffered: started without blocking (MPI_Isend) and completed when the receive is
    reached; receives block. With `blocking_sends` a send blocks too, until its receive is reached. What can run doesn't
    depend on who goes first, so one order stands for all. A cursor short of its program's end means deadlock.
    """
    programs = needs.programs
    cursors = [0] * len(programs)
    done: set[Action] = set()
    order: list[tuple[int, Action]] = []

    def can_run(action: Action) -> bool:
        if not done.issuperset(needs.of(action)):
            return False
        if blocking_sends and action.kind in SENDS and partner(action) in needs.place:
            rank, position = needs.place[partner(action)]
            return position <= cursors[rank]
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while cursors[rank] < len(program) and can_run(program[cursors[rank]]):
                action = program[cursors[rank]]
                done.add(action)
                order.append((rank, action))
                cursors[rank] += 1
                moved = True
    return order, cursors


def earliest_start(programs: Programs, durations: Mapping[str, float] = UNIT) -> list[list[float]]:
    """Return the start of every action, each as early as its rank and its needs allow.

    programs: lowered, or the ranks of a table, where a stage's output reaches the next rank at once.
    durations: by kind; a kind that is absent takes no time, and a part takes its equal share of the whole.
    Raises ScheduleError if the programs can't be played to their end.
    """
    needs = Needs(programs)
    order, cursors = play(needs)
    for rank, program in enumerate(programs):
        if cursors[rank] < len(program):
            raise ScheduleError(f"rank {rank}, position {cursors[rank]}: {program[cursors[rank]]} can never start")
    starts: list[list[float]] = [[] for _ in programs]
    free = [0] * len(programs)
    end: dict[Action, float] = {}
    for rank, action in order:
        start = max([free[rank], *(end[need] for need in needs.of(action))])
        starts[rank].append(start)
        end[action] = free[rank] = start + _duration(action, durations, needs)
    return starts


def _duration(action: Action, durations: Mapping[str, float], needs: Needs) -> float:
    whole = durations.get(action.kind, 0)
    parts = needs.num_parts(action) if action.kind in COMPUTE else 1
    return whole if parts == 1 else Fraction(whole) / parts  # a fraction, so that the parts sum to the whole


def makespan(programs: Programs, durations: Mapping[str, float] = UNIT) -> float:
    """Return the time from the first start to the last end over all ranks."""
    starts, needs = earliest_start(programs, durations), Needs(programs)
    last = [(row[-1], program[-1]) for row, program in zip(starts, programs) if program]
    return max((start + _duration(action, durations, needs) for start, action in last), default=0)


def bubble(programs: Programs, durations: Mapping[str, float] = UNIT) -> float:
    """Return the share of the makespan in which a rank computes nothing, averaged over ranks.

    (p - 1) / (m + p - 1) for GPipe and 1F1B (arXiv:1811.06965, arXiv:2104.04473).
    """
    needs = Needs(programs)
    busy = sum(_duration(action, durations, needs) for program in programs for action in program if action.kind in COMPUTE)
    span = makespan(programs, durations) * len(programs)
    return float(1 - Fraction(busy) / Fraction(span)) if span else 0.0
