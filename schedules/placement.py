"""Which rank has which stage, by the name of the schedule.

    plain     stage s on rank s                              1f1b, zb-h1, ...; each copy of dualpipe, the second backwards
    looped    stage s on rank s mod p: around and around     interleaved, looped-bfs, interleaved-zb
    v         there and back: rank r has r and 2p-1-r        zbv, v-half, v-min, dualpipev
"""

from mpitrain.errors import ScheduleError

LOOPED = ("interleaved", "looped-bfs", "interleaved-zb")
V = ("zbv", "zbv-auto", "v-half", "v-min", "dualpipev")


def chunks_of(name: str, asked: int | None) -> int:
    """Return the stages per rank of one copy of the model. Raises ScheduleError if `asked` isn't possible."""
    if name in LOOPED:
        return asked or 2
    fixed = 2 if name in V else 1
    if asked not in (None, fixed):
        raise ScheduleError(f"{name}: found {asked} chunks, needed {fixed} a rank; leave it out or choose {', '.join(LOOPED)}")
    return fixed


def placement(name: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage of one copy (the first)."""
    there = tuple(range(num_ranks))
    return there + there[::-1] if name in V else there * chunks
