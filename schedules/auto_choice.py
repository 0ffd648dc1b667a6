"""`auto`: the schedule of the catalogue with the shortest step, for given times, memory and placement.

Schedules with a second copy of the model, or with segments, train to other bits: only when asked
for.
"""

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import NamedTuple

from mpitrain.errors import ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.families.zb_auto import planned
from mpitrain.schedules.options import UNIT_TIMES, Options, StageTimes
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.played import Played, played
from mpitrain.schedules.search.problem import ROUNDING, Problem, is_large, problem_of
from mpitrain.schedules.search.timed_order import OrderedPlay, order_of
from mpitrain.schedules.table import Table

AUTO = "auto"
StageTimesOf = Callable[[tuple[int, ...]], tuple[StageTimes, ...] | None]  # by the rank of each stage


class Choice(NamedTuple):
    """The schedule that was chosen, its options of those given, and all that fit.

    makespans: of all schedules that fit, the shortest first.  error: as given.
    """

    name: str
    options: Options
    played: Played
    makespans: dict[str, float]
    error: float = 0

    @property
    def table(self) -> Table:
        """The table, with a note of how it was chosen."""
        after = [f"{name} {makespan:.6g}" for name, makespan in self.makespans.items() if name != self.name]
        note = f"{AUTO}: {self.name} is the shortest of {len(self.makespans)} schedules that fit"
        if self.error:
            note += f", or has fewer messages or stashes and is within the times' error of {self.error:.1%}"
        return self.played.table._replace(notes=(note + "; next " * bool(after) + ", ".join(after[:3]),))


class _Candidate(NamedTuple):
    """A schedule that fits. peak: stashes of a rank's whole share."""

    makespan: float
    span: float
    messages: int
    peak: float
    name: str
    options: Options
    table: Table

    @property
    def rank(self) -> tuple[float, float, int, float]:
        return self[:4]

    @property
    def frugality(self) -> tuple[int, float, float, float]:
        """What comes first of makespans that can't be told apart: fewest messages, then stashes.

        A message keeps two ranks from computing, and what holds more stashes touches more memory.
        """
        return self.messages, self.peak, self.makespan, self.span


def fastest(
    num_ranks: int,
    num_microbatches: int,
    options: Options,
    stage_times_of: StageTimesOf | None = None,
    most_stages: int | None = None,
    error: float = 0,
) -> Choice:
    """Choose the schedule of the shortest makespan, of these of the shortest span and fewest messages.

    options: `chunks` leaves only schedules of so many stages a rank; memory_limit is p if not given.
    most_stages: that the model can be cut into.
    error: the share by which times may be wrong: of makespans no further from the shortest, the one
    with the fewest messages and stashes is chosen. Raises ScheduleError if no schedule fits.
    """
    for option in ("group", "segments"):
        if getattr(options, option) is not None:
            raise ScheduleError(f"{AUTO}: {option} has no effect on it; leave it out or name a schedule")
    limit = planned(AUTO, options, memory_limit=num_ranks).memory_limit
    options = options._replace(memory_limit=limit).strict()
    fits: list[_Candidate] = []
    for name in sorted(_names(num_ranks, options.chunks, most_stages), key=_is_searched):
        rank_of = catalog.placement(name, num_ranks, _chunks(name, options))
        asked = options._replace(
            stage_times=stage_times_of(rank_of) if stage_times_of else options.stage_times
        )
        problem = problem_of(rank_of, num_microbatches, asked)
        if _is_left_out(name, problem, min((one.makespan for one in fits), default=inf)):
            continue
        taken = asked.only(catalog.FAMILIES[name].takes)
        try:
            table = catalog.build(name, num_ranks, num_microbatches, taken)
        except ScheduleError:
            continue  # not defined for this size
        if (rank := _rank(problem, table, asked)) is not None:
            fits.append(_Candidate(*rank, name, asked, table))
    if not fits:
        raise ScheduleError(
            f"{AUTO}: found no schedule within {limit:g} stashes on {num_ranks} ranks"
            + (f" with {options.chunks} chunks" if options.chunks else "")
            + "; raise the memory limit, or leave out what is fixed"
        )
    best = min(fits, key=attrgetter("rank"))
    if error:
        near = [one for one in fits if one.makespan <= best.makespan * (1 + error)]
        best = min(near, key=attrgetter("frugality"))
    fits.sort(key=lambda one: (one.makespan, one is not best))
    makespans = {one.name: one.makespan for one in fits}
    taken = best.options.only(catalog.FAMILIES[best.name].takes)
    return Choice(best.name, taken, played(best.table, best.options, 0), makespans, error)


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


def _is_left_out(name: str, problem: Problem, makespan: float) -> bool:
    """Return whether a schedule isn't searched for: no time, or it can't be shorter than the best so far.

    Below p stashes `zb-auto` and `zbv-auto` have no orders that the later search of their placement
    doesn't try, unless stages differ, of which they know nothing.
    """
    family = catalog.FAMILIES[name]
    if "times" not in family.takes:
        return False
    large = is_large(problem.num_stages, problem.num_microbatches)
    if _is_searched(name):
        return (large and makespan < inf) or makespan <= problem.bound * (1 + ROUNDING)
    chunks = max(map(len, problem.stages))
    is_below = problem.limit < chunks * min(problem.where.num_ranks, problem.num_microbatches)
    where = problem.where
    is_even = len(set(zip(where.forward, where.input, where.weight))) == 1
    return (is_below and is_even and not large) or makespan <= problem.bound * (1 + ROUNDING)


def _rank(problem: Problem, table: Table, options: Options) -> tuple[float, float, int, float] | None:
    """Return what schedules are compared by; None: it doesn't fit. Sums nearly equal are equal."""
    plan = OrderedPlay(problem, order_of(table.ranks, split=False)).play()
    if plan is None:
        return None
    lengths = plan.makespan, plan.span
    if any(PAIR in actions for actions in table.ranks):  # whose messages wait for both
        timeline = simulate_table(table, options.times or UNIT_TIMES, options.stage_times)
        lengths = timeline.makespan, timeline.span
    makespan, span = (float(f"{value:.9g}") for value in lengths)
    neighbours = zip(problem.where.rank_of, problem.where.rank_of[1:])
    messages = [0] * problem.where.num_ranks
    for pair in neighbours:
        for rank in set(pair) if pair[0] != pair[1] else ():
            messages[rank] += problem.num_microbatches
    return makespan, span, max(messages), plan.peak(problem) / max(map(len, problem.stages))
