"""From a schedule's name to its table: the one place that knows all families.

A family whose ranks hold one stage each is a function of (num_stages, num_microbatches, stage). A family with its own
placement will be a function of (num_stages, num_microbatches) that returns the rows of all ranks, entered in ROWS directly.
"""

from collections.abc import Callable
from difflib import get_close_matches

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action
from mpitrain.schedules.forward_only import forward_only
from mpitrain.schedules.gpipe import gpipe
from mpitrain.schedules.one_f_one_b import one_f_one_b
from mpitrain.schedules.table import Table, make_table

Rows = list[list[Action]]


def _stage_per_rank(order: Callable[[int, int, int], list[Action]]) -> Callable[[int, int], Rows]:
    """Place stage s on rank s."""
    return lambda num_stages, num_microbatches: [order(num_stages, num_microbatches, stage) for stage in range(num_stages)]


ROWS: dict[str, Callable[[int, int], Rows]] = {
    "gpipe": _stage_per_rank(gpipe),
    "1f1b": _stage_per_rank(one_f_one_b),
    "forward": _stage_per_rank(forward_only),  # evaluation's, not for training
}
NAMES = tuple(name for name in ROWS if name != "forward")  # what users may choose


def build(name: str, num_stages: int, num_microbatches: int) -> Table:
    """Build the table of a named schedule. Raises ScheduleError for an unknown name or a size it is not defined for."""
    if name not in ROWS:
        close = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ScheduleError(f"unknown schedule {name!r}; {hint}There are: {', '.join(NAMES)}")
    if num_stages < 1:
        raise ScheduleError(f"{name}: found {num_stages} stages, needed at least 1; each stage is a slice of the model's blocks")
    if num_microbatches < 1:
        raise ScheduleError(f"{name}: found {num_microbatches} microbatches, needed at least 1; raise batch.global or lower batch.micro")
    return make_table(name, ROWS[name](num_stages, num_microbatches))
