"""`auto`: the schedule of the catalogue with the shortest step, for given times, memory and placement.

Schedules with a second copy of the model, or with sequences in segments, are left to whoever asks
for them: they train to other bits.
"""

from collections.abc import Callable
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.families.zb_auto import planned
from mpitrain.schedules.options import UNIT_TIMES, Options, StageTimes
from mpitrain.schedules.played import Played, played
from mpitrain.schedules.search.problem import ROUNDING, Problem, is_large, stage_costs
from mpitrain.schedules.table import Table

AUTO = "auto"
StageTimesOf = Callable[[tuple[int, ...]], tuple[StageTimes, ...] | None]  # by the rank of each stage


class Choice(NamedTuple):
    """The schedule that was chosen, the options that its family takes of those given, and all that fit.

    makespans: of all schedules that fit, the shortest first.
    """

    name: str
    options: Options
    played: Played
    makespans: dict[str, float]

    @property
    def table(self) -> Table:
        """The table, with a note of how it was chosen."""
        after = [f"{name} {makespan:.6g}" for name, makespan in self.makespans.items() if name != self.name]
        note = f"{AUTO}: {self.name} is the shortest of {len(self.makespans)} schedules that fit"
        return self.played.table._replace(notes=(note + "; next " * bool(after) + ", ".join(after[:3]),))


def fastest(
    num_ranks: int,
    num_microbatches: int,
    options: Options,
    stage_times_of: StageTimesOf | None = None,
    most_stages: int | None = None,
) -> Choice:
    """Choose the schedule of the shortest makespan, of these of the shortest span and fewest messages.

    options: `chunks` leaves only schedules of so many stages a rank; memory_limit is p if not given.
    most_stages: that the model can be cut into. Raises ScheduleError if no schedule fits.
    """
    for option in ("group", "segments"):
        if getattr(options, option) is not None:
            raise ScheduleError(f"{AUTO}: {option} has no effect on it; leave it out or name a schedule")
    limit = planned(AUTO, options, memory_limit=num_ranks).memory_limit
    options = options._replace(memory_limit=limit).strict()
    candidates: list[tuple[tuple[float, ...], Choice]] = []
    for name in sorted(_names(num_ranks, options.chunks, most_stages), key=_is_searched):
        rank_of = catalog.placement(name, num_ranks, _chunks(name, options))
        stages = stage_times_of(rank_of) if stage_times_of else options.stage_times
        asked = options._replace(stage_times=stages)
        best = min(candidates)[0][0] if candidates else None
        if _is_searched(name) and best is not None:
            large = is_large(len(rank_of), num_microbatches)  # a search plays little more than named orders
            if large or best <= _bound(rank_of, num_microbatches, asked):
                continue
        try:
            one = _played(name, num_ranks, num_microbatches, asked)
        except ScheduleError:
            continue  # not defined for this size
        if not one.played.above_limit:
            candidates.append(((*_rank(one.played), len(candidates)), one))
    if not candidates:
        raise ScheduleError(
            f"{AUTO}: found no schedule within {limit:g} stashes on {num_ranks} ranks"
            + (f" with {options.chunks} chunks" if options.chunks else "")
            + "; raise the memory limit, or leave out what is fixed"
        )
    candidates.sort()
    makespans = {one.name: one.played.timeline.makespan for _, one in candidates}
    return candidates[0][1]._replace(makespans=makespans)


def _names(num_ranks: int, chunks: int | None, most_stages: int | None) -> list[str]:
    """Return the schedules with one copy and whole sequences that have so many stages a rank."""
    names = []
    for name, family in catalog.FAMILIES.items():
        number = _chunks(name, Options(chunks=chunks))
        if number == 1 and name in catalog.LOOPED:
            continue  # no loop
        fits = chunks in (None, number) and (most_stages is None or num_ranks * number <= most_stages)
        if fits and family.copies == 1 and "segments" not in family.takes:
            names.append(name)
    return names


def _chunks(name: str, options: Options) -> int:
    return catalog.chunks_of(name, options.chunks if name in catalog.LOOPED else None)


def _is_searched(name: str) -> bool:
    return "stage_times" in catalog.FAMILIES[name].takes


def _bound(rank_of: tuple[int, ...], num_microbatches: int, options: Options) -> float:
    """Return what no order of a placement is shorter than."""
    where = stage_costs(rank_of, options.times or UNIT_TIMES, options.stage_times)
    chunks = len(rank_of) // where.num_ranks
    assert options.memory_limit is not None and options.weight_memory is not None
    problem = Problem(where, num_microbatches, options.memory_limit * chunks, options.weight_memory)
    return problem.bound * (1 - ROUNDING)


def _played(name: str, num_ranks: int, num_microbatches: int, options: Options) -> Choice:
    taken = options.only(catalog.FAMILIES[name].takes)
    table = catalog.build(name, num_ranks, num_microbatches, taken)
    assert options.weight_memory is not None
    return Choice(
        name,
        taken,
        played(
            table,
            options.times or UNIT_TIMES,
            options.memory_limit,
            options.weight_memory,
            most_proved=0,
            stage_times=options.stage_times,
        ),
        {},
    )


def _rank(played: Played) -> tuple[float, float, int, float]:
    """Return what schedules are compared by. Sums of floats that are nearly equal are equal."""
    makespan, span = (float(f"{value:.9g}") for value in (played.timeline.makespan, played.span))
    return makespan, span, max(played.messages), max(played.peak_stashes)
