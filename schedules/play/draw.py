"""Draw a schedule in unit time, one row per rank. For 1F1B, 3 stages, 3 microbatches:

    tick   0              5              10
    rank 0 F0 F1 F2 .  .  .  .  B0--- .  B1--- .  B2---
    rank 1 .  F0 F1 .  .  B0--- F2 B1--- .  B2--- .  .
    rank 2 .  .  F0 B0--- F1 B1--- F2 B2--- .  .  .  .
    bubble 40.0% of 15 ticks

A cell is a computation and its microbatch, and what else is needed to tell two apart:

    f0       on the rank's second stage (with two copies of the model: of the second copy)
    F0.2     where ranks have more than two stages: on the rank's stage 2, counted from 0
    F0a F0b  segments of microbatch 0
    F3+B1--- a pair, run together
    F0@5     on stage 5: with a mark, because the message beside it names stages
"""

import math
from collections.abc import Sequence
from itertools import islice

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import COMPUTE, PAIR, Action
from mpitrain.schedules.lowering.messages import with_messages
from mpitrain.schedules.lowering.needs import Needs, Programs
from mpitrain.schedules.pairs import grouped
from mpitrain.schedules.play.simulate import UNIT, simulate
from mpitrain.schedules.play.timeline import Timeline
from mpitrain.schedules.table import Table

Rows = list[list[Action]]
TICKS_PER_NUMBER = 5  # in the header
WIDTH = 110
MOST_LINES = 70  # of a grid on the screen
MOST_MARKED = 16  # ranks of a grid with a mark


def grid(
    schedule: Table | Programs, mark: tuple[int, int] | None = None, width: int = WIDTH, *, waits: bool = True
) -> str:
    """Draw a table or programs: F takes one tick, B two, I and W one; a dot is a bubble.

    Messages take no time. A split backward is one, where its last part stands. `mark=(rank,
    position)` puts a `!` after the computation at, or next after, that position. Rows over `width`
    columns continue below; a marked drawing keeps only the piece with the mark, and of many ranks
    those near it. Programs that can't be played to their end are drawn without waits
    (`waits=False`), and say so.
    """
    programs = with_messages(schedule) if isinstance(schedule, Table) else schedule
    rows = _rows(programs)
    timeline = _played(programs) if waits else None
    if timeline:
        starts = _starts(timeline)
        remark = f"bubble {timeline.bubble:.1%} of"
    else:
        starts = _back_to_back(rows)
        remark = "drawn without waits, as these programs can't be played to their end:"
    span = max((times[-1] + UNIT[row[-1].kind] for row, times in zip(rows, starts) if row), default=0)
    segments = schedule.segments if isinstance(schedule, Table) else 1
    labels = _labels(
        rows, segments, _marked(schedule.ranks if isinstance(schedule, Table) else schedule, mark)
    )
    column = 1 + max((len(label.rstrip("!")) for row in labels for label in row), default=1)
    paired = map(_paired, programs, rows)
    near = _near(mark, len(rows))
    cells = islice(zip(rows, starts, labels, paired), near.start, near.stop)
    lines = {f"rank {rank}": _line(*cell, span, column) for rank, cell in zip(near, cells)}
    bands = _bands(lines, span, column, width)
    if mark:
        bands = [band for band in bands if "!" in band] or bands[-1:]
    return "\n".join([*bands, f"{remark} {span} ticks"])


def least_lines(table: Table, width: int = WIDTH) -> int:
    """Estimate the lines of a table's grid, without bubbles: drawing a large one takes seconds."""
    ticks = max(sum(UNIT.get(action.kind, 0) for action in actions) for actions in table.ranks)
    column = len(f"F{table.num_microbatches // table.segments - 1} ")
    return math.ceil(ticks * column / width) * (len(table.ranks) + 1)


# ---------------------------------------------------------------- what to draw, and when


def _whole(programs: Programs) -> Rows:
    last_part = Needs(programs).last_part
    return [
        [a._replace(part=None) for a in program if a.kind not in COMPUTE or last_part[a[:3]] == a]
        for program in programs
    ]


def _rows(programs: Programs) -> Rows:
    return [[action for action in program if action.kind in COMPUTE] for program in _whole(programs)]


def _played(programs: Programs) -> Timeline | None:
    try:
        return simulate(_whole(programs), UNIT)
    except ScheduleError:
        return None


def _starts(timeline: Timeline) -> list[list[int]]:
    """Return the ticks at which computations start: whole ones, since all times are."""
    return [
        [int(start) for _, start, _ in timeline.computations(rank)] for rank in range(len(timeline.programs))
    ]


def _back_to_back(rows: Rows) -> list[list[int]]:
    starts = []
    for row in rows:
        ends = [0]
        for action in row:
            ends.append(ends[-1] + UNIT[action.kind])
        starts.append(ends[:-1])
    return starts


# ---------------------------------------------------------------- text


def _marked(programs: Programs, mark: tuple[int, int] | None) -> tuple[int, Action] | None:
    if mark is None:
        return None
    rank, position = mark
    return next(
        (
            (rank, action._replace(part=None))
            for action in programs[rank][position:]
            if action.kind in COMPUTE
        ),
        None,
    )


def _near(mark: tuple[int, int] | None, num_ranks: int) -> range:
    """Return the ranks that are drawn: all, or of many those around the mark."""
    if mark is None or num_ranks <= MOST_MARKED:
        return range(num_ranks)
    first = min(max(0, mark[0] - MOST_MARKED // 2), num_ranks - MOST_MARKED)
    return range(first, first + MOST_MARKED)


def _labels(rows: Rows, segments: int, marked: tuple[int, Action] | None) -> list[list[str]]:
    stages = [sorted({action.stage for action in row}) for row in rows]
    most = max(map(len, stages), default=0)

    def label(rank: int, action: Action) -> str:
        if marked and most > 1:
            return str(action) + "!" * ((rank, action) == marked)
        chunk = stages[rank].index(action.stage)
        kind = action.kind.lower() if most == 2 and chunk else action.kind
        return (
            f"{kind}{microbatch_label(action.index, segments)}"
            + f".{chunk}" * (most > 2)
            + "!" * ((rank, action) == marked)
        )

    return [[label(rank, action) for action in row] for rank, row in enumerate(rows)]


def microbatch_label(index: int, segments: int) -> str:
    """Write a microbatch, with a letter for its segment if it has several."""
    microbatch, segment = divmod(index, segments)
    if segments == 1:
        return str(microbatch)
    return f"{microbatch}{chr(ord('a') + segment)}" if segments <= 26 else f"{microbatch}/{segment}"


def _paired(program: Sequence[Action], row: Sequence[Action]) -> set[Action]:
    """Return the forwards of a row that run together with the backward after them, whole or in parts."""
    pairs = {
        tuple(member._replace(part=None) for member in group[1:])
        for group in grouped(program)
        if group[0] == PAIR
    }
    return {forward for forward, following in zip(row, row[1:]) if (forward, following) in pairs}


def _line(
    row: list[Action], starts: list[int], labels: list[str], paired: set[Action], span: int, column: int
) -> str:
    """Write one rank's row, `column` characters a tick; a longer cell is drawn out with dashes."""
    idle = ".".ljust(column)
    line = ""
    for action, start, label in zip(row, starts, labels):
        length = UNIT[action.kind] * column
        line += idle * (start - len(line) // column)
        cell = label.ljust(length - 1, "-" if UNIT[action.kind] > 1 else " ")
        line += cell.ljust(length, "+" if action in paired else " ")
    return line + idle * (span - len(line) // column)


def _bands(lines: dict[str, str], span: int, column: int, width: int) -> list[str]:
    """Put the header over the rows; cut them into bands of at most `width` columns."""
    margin = 1 + max(map(len, lines), default=0)
    room = (width - margin) // column
    ticks = span if span <= room else max(1, room // TICKS_PER_NUMBER) * TICKS_PER_NUMBER
    ticks = max(ticks, 1)
    header = "".join(str(tick).ljust(TICKS_PER_NUMBER * column) for tick in range(0, span, TICKS_PER_NUMBER))
    bands = []
    for left in range(0, span * column, ticks * column):
        pieces = [line[left : left + ticks * column] for line in (header, *lines.values())]
        bands.append(
            "\n".join((name.ljust(margin) + piece).rstrip() for name, piece in zip(["tick", *lines], pieces))
        )
    return bands
