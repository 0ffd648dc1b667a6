"""From a schedule's name to its table. Families are found by their files in schedules/families/.

A new schedule is one file. This package imports nothing of mpitrain, so it searches by itself.
"""

import importlib
import pkgutil
from collections.abc import Iterator

from mpitrain.errors import ScheduleError, counted, nearest
from mpitrain.schedules import families
from mpitrain.schedules.families.one_f_one_b import ONE_F_ONE_B
from mpitrain.schedules.families.seq1f1b import SEGMENTS
from mpitrain.schedules.family import ScheduleFamily
from mpitrain.schedules.limits import require_size
from mpitrain.schedules.options import DEFAULTS, Options
from mpitrain.schedules.table import Table, make_table

# The order in which messages and comparisons list them; others follow, by their files.
LISTED = (
    "gpipe", "1f1b", "eager-1f1b", "interleaved", "looped-bfs", "zb-h1", "zb-h2", "zb-auto", "plain-auto",
    "interleaved-zb", "interleaved-auto", "1f1b-v", "zbv", "zbv-auto", "v-half", "v-min", "v-auto",
    "dualpipe", "dualpipev", "seq1f1b",
)  # fmt: skip


def _defined() -> Iterator[ScheduleFamily]:
    for name in sorted(module.name for module in pkgutil.iter_modules(families.__path__)):
        module = importlib.import_module(f"{families.__name__}.{name}")
        for value in vars(module).values():
            if isinstance(value, ScheduleFamily) and value.name:
                yield value


def _by_name() -> dict[str, ScheduleFamily]:
    found: dict[str, ScheduleFamily] = {}
    for family in _defined():
        other = found.setdefault(family.name, family)
        assert other is family, f"two schedules are called {family.name}"
    first = [name for name in LISTED if name in found]
    return {name: found[name] for name in dict.fromkeys([*first, *found])}


FAMILIES = _by_name()
NAMES = tuple(FAMILIES)
SIMPLEST = ONE_F_ONE_B.name  # of one stage, and where nothing else is asked for
PROPOSED = tuple(name for name, family in FAMILIES.items() if family.proposed)  # by a planner
LOOPED = tuple(name for name, family in FAMILIES.items() if family.placed == "looped")


def schedule_named(name: str) -> ScheduleFamily:
    """Return how a named schedule is made. Raises ScheduleError, with the nearest name."""
    if name not in FAMILIES:
        close = nearest(name.lower(), NAMES)
        hint = f"did you mean {close!r}? " if close else ""
        missing = ": no such file" if "." in name or "/" in name else ""
        raise ScheduleError(f"unknown schedule {name[:100]!r}{missing}; {hint}known: {', '.join(NAMES)}")
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


def segments_of(family: ScheduleFamily, asked: int | None) -> int:
    """Return into how many segments a schedule cuts a sequence. asked: pipeline.segments."""
    return asked or SEGMENTS if "segments" in family.takes else 1


def placement(name: str, num_ranks: int, chunks: int) -> tuple[int, ...]:
    """Return the rank of every stage of one copy (the first)."""
    return FAMILIES[name].rank_of(num_ranks, chunks)


def build(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    options: Options = DEFAULTS,
    family: ScheduleFamily | None = None,
) -> Table:
    """Build the table of a named schedule for `num_ranks` pipeline ranks.

    Raises ScheduleError for an unknown name, a useless option, or a size it is not defined for.
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
    segments = segments_of(family, options.segments)
    chunks = chunks_of(name, options.chunks, family)
    microbatches = counted(num_microbatches, "microbatches", ",")
    size = f"found {counted(num_ranks, 'ranks', ',')} x {microbatches}"
    size += f" x {chunks:,} chunks" * (chunks > 1) + f" x {segments:,} segments" * (segments > 1)
    require_size(name, num_ranks * num_microbatches * chunks * segments, size)
    return make_table(
        name, family.rows(num_ranks, num_microbatches, options), copies=family.copies, segments=segments
    )
