"""`mpitrain schedule frontier`: time against memory of all schedules, as text or JSON."""

import json

from mpitrain.commands.schedule.comparison import searched, with_remarks
from mpitrain.commands.schedule.text import figures, number, size_in_words, times_in_words
from mpitrain.plan.declared.formatting import aligned
from mpitrain.schedules.options import UNIT_TIMES
from mpitrain.schedules.time_and_memory import Frontier, Point, StepSize

TITLES = ("peak stashes", "makespan", "bound", "above it", "schedule")


def as_text(found: Frontier, size: StepSize) -> str:
    """Return the front and the others as two tables."""
    ranks = size_in_words(size)
    head = f"{ranks}; {times_in_words(size.options.times or UNIT_TIMES)}"
    front = aligned([TITLES, *map(_cells, found.front)])
    others = aligned([TITLES, *map(_cells, found.others)]) if found.others else "none"
    return "\n\n".join([head, FRONT, front, "others", others, LEGEND])


FRONT = (
    "on the front, of schedules with one copy of the model and whole microbatches: "
    "none is shorter with as little memory"
)
LEGEND = (
    "peak      stashes of a rank's whole share of layers, on the worst rank\n"
    "bound     no order takes less with this peak, whether a rank has one stage, chunks in loops, or a V\n"
    "--memory-limit: of a searched order, what it is found with"
)


def _cells(point: Point) -> tuple[str, ...]:
    above = point.makespan / point.bound - 1
    table = point.played.table
    remarks = [f"{table.copies} copies of the model"] * (table.copies > 1)
    remarks += [*searched(point.played), *[f"{table.segments} segments"] * (table.segments > 1)]
    cells = number(point.peak), number(point.makespan), number(point.bound), f"{above:.1%}"
    return *cells, with_remarks(point.name, remarks)


def as_json(found: Frontier) -> str:
    """Return one JSON object: `front`, from least memory to least time, and `others`."""
    front, others = (
        [{**figures(each.played), "memory_limit": each.limit, "bound": each.bound} for each in points]
        for points in (found.front, found.others)
    )
    return json.dumps({"front": front, "others": others})
