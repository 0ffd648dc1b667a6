"""How large a schedule may be. Refused before any memory is taken: every rank holds the programs of all."""

from mpitrain.errors import ScheduleError

# of one step, over all pipeline ranks: about a GB, and half a minute to prove
MOST_FORWARDS = 1_000_000
MOST_SEARCHED = 200_000  # forwards whose order is searched for: a minute and a half
MOST_TABLE_BYTES = 32 << 20  # of a user's own table, as text or CSV
MOST_TABLE_CELLS = 1_000_000  # of it: 20 s to read
MOST_TRACE_BYTES = 256 << 20  # of a measured one: a hundred ranks and steps


def require_searchable(name: str, num_ranks: int, num_microbatches: int) -> None:
    """Raise ScheduleError if a search for the order of a step would take too long."""
    if num_ranks * num_microbatches > MOST_SEARCHED:
        raise ScheduleError(
            f"{name}: found {num_ranks:,} ranks x {num_microbatches:,} microbatches = "
            f"{num_ranks * num_microbatches:,} forwards, at most {MOST_SEARCHED:,} are searched; choose a "
            "smaller size, or zb-h1"
        )


def require_readable(name: str, text: str) -> None:
    """Raise ScheduleError if a table has more cells than are read. Bubbles count, and line ends do."""
    num_cells = sum(text.count(mark) for mark in ", \t;\n")
    if num_cells > MOST_TABLE_CELLS:
        raise ScheduleError(
            f"{name}: found {num_cells:,} cells, at most {MOST_TABLE_CELLS:,} are read; give a smaller table"
        )


def require_size(name: str, num_forwards: int, found: str) -> None:
    """Raise ScheduleError if a step has more forwards than fit in memory."""
    if num_forwards > MOST_FORWARDS:
        raise ScheduleError(
            f"{name}: {found} = {num_forwards:,} forwards, at most {MOST_FORWARDS:,} fit in memory; choose a "
            "smaller size"
        )
