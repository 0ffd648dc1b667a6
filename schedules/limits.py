"""How large a schedule may be. Refused before any memory is taken: every rank holds the programs of all."""

from mpitrain.errors import ScheduleError

# of one step, over all pipeline ranks: about a GB, and half a minute to prove
MOST_FORWARDS = 1_000_000
MOST_TABLE_BYTES = 32 << 20  # of a user's own table, as text or CSV
MOST_TRACE_BYTES = 256 << 20  # of a measured one: a hundred ranks and steps


def require_size(name: str, num_forwards: int, found: str) -> None:
    """Raise ScheduleError if a step has more forwards than fit in memory."""
    if num_forwards > MOST_FORWARDS:
        raise ScheduleError(
            f"{name}: {found} = {num_forwards:,} forwards, at most {MOST_FORWARDS:,} fit in memory; choose a "
            "smaller size"
        )
