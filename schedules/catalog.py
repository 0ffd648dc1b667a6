"""From a schedule's name to its table: the one place that knows all families.

A family whose ranks hold one stage each is a function of (num_stages, num_microbatches, stage); a
family with its own placement is a function of (num_ranks, num_microbatches, options) that returns
the rows of all ranks. Placements:

    plain     stage s on rank s; each copy of dualpipe, the second backwards
    looped    stage s on rank s mod p: around and around
    v         there and back: rank r has r and 2p-1-r
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Literal, NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules.actions import Action
from mpitrain.schedules.families.dualpipe import dualpipe, dualpipev
from mpitrain.schedules.families.gpipe import gpipe
from mpitrain.schedules.families.interleaved import interleaved, interleaved_zb, looped_bfs
from mpitrain.schedules.families.one_f_one_b import eager_1f1b, one_f_one_b
from mpitrain.schedules.families.seq1f1b import SEGMENTS, seq1f1b
from mpitrain.schedules.families.v_half import v_half, v_min
from mpitrain.schedules.families.zb_auto import zb_auto
from mpitrain.schedules.families.zbv import zbv
from mpitrain.schedules.families.zbv_auto import zbv_auto
from mpitrain.schedules.families.zero_bubble import zb_h1, zb_h2
from mpitrain.schedules.limits import require_size
from mpitrain.schedules.options import DEFAULTS, Options
from mpitrain.schedules.table import Table, make_table

Rows = list[list[Action]]


class ScheduleFamily(NamedTuple):
    """How a named schedule is made, which options it understands, and which rank has which stage.

    Whoever uses the library can have one of his own: a function of stage_per_rank()'s, or rows of all
    ranks.
    """

    rows: Callable[[int, int, Options], Rows]
    takes: tuple[str, ...] = ()
    copies: int = 1
    placed: Literal["plain", "looped", "v"] = "plain"


def stage_per_rank(order: Callable[[int, int, int], list[Action]]) -> ScheduleFamily:
    """Place stage s on rank s."""
    return ScheduleFamily(
        lambda num_ranks, num_microbatches, _: [
            order(num_ranks, num_microbatches, stage) for stage in range(num_ranks)
        ]
    )


FAMILIES: dict[str, ScheduleFamily] = {
    "gpipe": stage_per_rank(gpipe),
    "1f1b": stage_per_rank(one_f_one_b),
    "eager-1f1b": stage_per_rank(eager_1f1b),
    "interleaved": ScheduleFamily(interleaved, takes=("chunks", "group"), placed="looped"),
    "looped-bfs": ScheduleFamily(looped_bfs, takes=("chunks",), placed="looped"),
    "zb-h1": stage_per_rank(zb_h1),
    "zb-h2": stage_per_rank(zb_h2),
    "zb-auto": ScheduleFamily(zb_auto, takes=("times", "memory_limit", "weight_memory")),
    "interleaved-zb": ScheduleFamily(interleaved_zb, takes=("chunks", "group"), placed="looped"),
    "zbv": ScheduleFamily(zbv, placed="v"),
    "zbv-auto": ScheduleFamily(zbv_auto, takes=("times", "memory_limit", "weight_memory"), placed="v"),
    "v-half": ScheduleFamily(v_half, placed="v"),
    "v-min": ScheduleFamily(v_min, placed="v"),
    "dualpipe": ScheduleFamily(dualpipe, copies=2),
    "dualpipev": ScheduleFamily(dualpipev, placed="v"),
    "seq1f1b": ScheduleFamily(seq1f1b, takes=("segments",)),
}
NAMES = tuple(FAMILIES)
LOOPED = tuple(name for name, family in FAMILIES.items() if family.placed == "looped")


def schedule_named(name: str) -> ScheduleFamily:
    """Return how a named schedule is made.

    Raises ScheduleError for a name that no schedule has, with the nearest one.
    """
    if name not in FAMILIES:
        close = get_close_matches(name.lower(), NAMES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        missing = ": no such file" if "." in name or "/" in name else ""
        raise ScheduleError(f"unknown schedule {name[:100]!r}{missing}; {hint}There are: {', '.join(NAMES)}")
    return FAMILIES[name]


def chunks_of(name: str, asked: int | None, family: ScheduleFamily | None = None) -> int:
    """Return the stages per rank of one copy of the model. Raises ScheduleError if `asked` isn't possible.

    family: of a schedule that isn't in the catalogue, here and below.
    """
    family = family or schedule_named(name)
    if family.placed == "looped":
        return asked or 2
    fixed = 2 if family.placed == "v" else 1
    if asked not in (None, fixed):
        raise ScheduleError(
            f"{name}: found {asked} chunks, needed {fixed} a rank; leave it out or choose {', '.join(LOOPED)}"
        )
    return fixed


def placement(name: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage of one copy (the first)."""
    there = tuple(range(num_ranks))
    return there + there[::-1] if FAMILIES[name].placed == "v" else there * chunks


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    options: Options = DEFAULTS,
    family: ScheduleFamily | None = None,
) -> Table:
    """Build the table of a named schedule for `num_ranks` pipeline ranks.

    Raises ScheduleError for an unknown name, an option it has no use for, or a size it is not
    defined for.
    """
    family = family or schedule_named(name)
    if num_ranks < 1:
        raise ScheduleError(
            f"{name}: found {num_ranks} stages, needed at least 1; each stage is a slice of the model's "
            "blocks"
        )
    if num_microbatches < 1:
        raise ScheduleError(
            f"{name}: found {num_microbatches} microbatches, needed at least 1; raise batch.global or lower "
            "batch.micro"
        )
    for option in options.given():
        if option not in family.takes:
            raise ScheduleError(
                f"{name}: {option} has no effect on it; it takes {', '.join(family.takes) or 'no options'}"
            )
    for option in ("chunks", "group", "segments"):
        if (number := getattr(options, option)) is not None and number < 1:
            raise ScheduleError(f"{name}: found {option} = {number}, needed at least 1")
    segments = options.segments or SEGMENTS if "segments" in family.takes else 1
    chunks = chunks_of(name, options.chunks, family)
    size = f"found {num_ranks:,} ranks x {num_microbatches:,} microbatches"
    size += f" x {chunks:,} chunks" * (chunks > 1) + f" x {segments:,} segments" * (segments > 1)
    require_size(name, num_ranks * num_microbatches * chunks * segments, size)
    return make_table(
        name, family.rows(num_ranks, num_microbatches, options), copies=family.copies, segments=segments
    )
