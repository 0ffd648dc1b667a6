"""Orders that are searched for: the shortest step with given times and a memory limit, for each placement.

plain-auto         a stage a rank
interleaved-auto   chunks in loops
v-auto             a V, there and back

All orders of the same placement that have a name take part in the search (see search/improve), so
that none of them that fits is shorter. Lower limits are searched, too (see Problem.rungs), so that more
memory costs no time. A limit is met from one stash of a rank's whole share on. Where
`options.recompute` or `options.offload` allow it, stashes that don't fit are recomputed or
offloaded (see search/recomputation) if that is shorter.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from mpitrain.errors import ScheduleError, counted
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.families.dualpipe import dualpipev
from mpitrain.schedules.families.gpipe import GPIPE
from mpitrain.schedules.families.interleaved import (
    CHUNKS,
    interleaved,
    interleaved_zb,
    looped_bfs,
    smallest_group,
    split_groups,
)
from mpitrain.schedules.families.one_f_one_b import EAGER_1F1B, ONE_F_ONE_B
from mpitrain.schedules.families.v_1f1b import v_1f1b
from mpitrain.schedules.families.v_blocks import published_v_orders, v_orders
from mpitrain.schedules.families.v_half import v_half, v_min
from mpitrain.schedules.families.zb_auto import planned, zb_orders
from mpitrain.schedules.families.zbv import zbv
from mpitrain.schedules.families.zbv_auto import zbv_orders
from mpitrain.schedules.families.zero_bubble import ZB_H1, ZB_H2
from mpitrain.schedules.family import Rows, ScheduleFamily
from mpitrain.schedules.limits import require_searchable
from mpitrain.schedules.options import DEFAULTS, Options, StageTimes, Times
from mpitrain.schedules.search.improve import num_plays, search, search_freed
from mpitrain.schedules.search.problem import ROUNDING, Problem, is_large, stage_costs
from mpitrain.schedules.search.timed_order import TimedOrder, is_shorter
from mpitrain.schedules.search_progress import Listener

MOST_BLOCKS = 100  # building blocks of a V that take part
REMEMBERED_LIMITS = 48  # for which an order isn't searched for again
TAKES = ("times", "stage_times", "memory_limit", "weight_memory", "recompute", "offload")


def plain_auto(num_ranks: int, num_microbatches: int, options: Options) -> Rows:
    """Compute order of every rank, a stage a rank. For 2 ranks, 3 microbatches, equal times, 2 stashes:

    rank 0:  F0 F1 I0 W0 F2 I1 W1 I2 W2
    rank 1:  F0 I0 F1 I1 W0 F2 I2 W1 W2
    """
    return _searched("plain-auto", num_ranks, num_microbatches, 1, options)


PLAIN_AUTO = ScheduleFamily(plain_auto, name="plain-auto", takes=TAKES)


def interleaved_auto(num_ranks: int, num_microbatches: int, options: Options) -> Rows:
    """Compute order of every rank with chunks in loops, as `interleaved` has them."""
    chunks = options.chunks or CHUNKS
    return _searched("interleaved-auto", num_ranks, num_microbatches, chunks, options)


INTERLEAVED_AUTO = ScheduleFamily(
    interleaved_auto, name="interleaved-auto", takes=("chunks", *TAKES), placed="looped"
)


def v_auto(num_ranks: int, num_microbatches: int, options: Options) -> Rows:
    """Compute order of every rank of a V, as `zbv`, `v-half` and `v-min` have it (arXiv:2405.15362)."""
    return _searched("v-auto", num_ranks, num_microbatches, 2, options)


V_AUTO = ScheduleFamily(v_auto, name="v-auto", takes=TAKES, placed="v")
SEARCHED = {family.name: family for family in (PLAIN_AUTO, INTERLEAVED_AUTO, V_AUTO)}


def _searched(name: str, num_ranks: int, num_microbatches: int, chunks: int, options: Options) -> Rows:
    require_searchable(name, num_ranks, num_microbatches)
    plan = planned(name, options, memory_limit=num_ranks)
    stages = options.stage_times
    if stages is not None and len(stages) != num_ranks * chunks:
        raise ScheduleError(
            f"{name}: found times of {counted(len(stages), 'stages')}, needed "
            f"{num_ranks * chunks}: {chunks} a rank"
        )
    listener = Listener(options.notify)
    copy = None if options.offload is None else options.offload / chunks
    sizes = name, num_ranks, num_microbatches, chunks
    size = SearchedSize(*sizes, plan.times, plan.weight_memory, stages, options.recompute, copy)
    return list(map(list, _best(size, plan.memory_limit * chunks, listener)))


class SearchedSize(NamedTuple):
    """What is searched for, under any limit. copy: the time to offload a stash of one stage."""

    name: str
    num_ranks: int
    num_microbatches: int
    chunks: int
    times: Times
    weight_memory: float
    stages: tuple[StageTimes, ...] | None
    recompute: float | None
    copy: float | None

    def problem(self, limit: float) -> Problem:
        rank_of = SEARCHED[self.name].rank_of(self.num_ranks, self.chunks)
        where = stage_costs(rank_of, self.times, self.stages)
        return Problem(where, self.num_microbatches, limit, self.weight_memory, self.recompute, self.copy)

    def known(self, limit: float) -> Iterator[Rows]:
        """Yield the orders of others that may fit."""
        options = DEFAULTS._replace(
            chunks=self.chunks,
            times=self.times,
            memory_limit=limit / self.chunks,
            weight_memory=self.weight_memory,
        )
        return KNOWN[self.name](self.num_ranks, self.num_microbatches, options)

    def repeated(self, limit: float, *, fills: bool) -> Iterator[Rows]:
        """Yield the orders of building blocks, of a V."""
        if self.name == V_AUTO.name:
            sizes = self.num_ranks, self.num_microbatches
            yield from v_orders(*sizes, limit, self.num_blocks, fills=fills)

    def published(self, limit: float) -> Iterator[Rows]:
        """Yield the orders that others make of building blocks, of a V whose ranks are all busy once."""
        if self.name == V_AUTO.name and self.num_microbatches >= self.num_ranks:
            yield from published_v_orders(self.num_ranks, self.num_microbatches, limit, self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """How many building blocks there is time for."""
        return min(MOST_BLOCKS, num_plays(6 * self.num_ranks * self.num_microbatches))


def _best(size: SearchedSize, limit: float, listener: Listener) -> Rows:
    """Return the best order that is found within a limit, or within less of it.

    Lower limits are searched as by themselves, so that more memory costs no time; one that can't
    have a shorter order is left out, and all below it.
    """
    limit = min(limit, size.chunks * size.num_microbatches)
    problem = size.problem(limit)
    best = _within(size, limit, listener)
    for lower in reversed(problem.rungs):
        if lower < limit - ROUNDING:
            if problem.within(lower).bound >= best.makespan * (1 - ROUNDING):
                break
            other = _within(size, lower, listener)
            best = other if is_shorter(other, best) else best
    return best.actions()


@lru_cache(REMEMBERED_LIMITS)
def _within(size: SearchedSize, limit: float, listener: Listener) -> TimedOrder:
    problem = size.problem(limit)
    whole = size._replace(recompute=None, copy=None)
    if not problem.frees:
        repeated, published = size.repeated(limit, fills=True), size.published(limit)
        return search(problem, size.known(limit), repeated, published, listener.notify)
    best = _within(whole, limit, listener)
    roomy = max(limit, size.chunks * size.num_ranks)
    # blocks that aren't filled have room for what is computed again: steps are shorter with them
    known = chain([best.actions()], size.known(roomy), size.repeated(roomy, fills=False))
    freed = search_freed(problem, known)
    return freed if freed and is_shorter(freed, best) else best


# ---------------------------------------------------------------- orders that have a name


def _plain(num_ranks: int, num_microbatches: int, options: Options) -> Iterator[Rows]:
    for family in (GPIPE, ONE_F_ONE_B, EAGER_1F1B, ZB_H1, ZB_H2):
        yield family.rows(num_ranks, num_microbatches, DEFAULTS)
    yield from zb_orders(num_ranks, num_microbatches, options)


def _looped(num_ranks: int, num_microbatches: int, options: Options) -> Iterator[Rows]:
    options = DEFAULTS._replace(chunks=options.chunks)
    groups = range(smallest_group(num_ranks), min(2 * num_ranks, num_microbatches) + 1)
    if is_large(num_ranks * (options.chunks or CHUNKS), num_microbatches):
        groups = groups[:: max(num_ranks // 2, 1)]  # p/2, p, 3p/2, 2p: each takes seconds
    for group in chain((None,), groups):
        more = options._replace(group=group)
        yield interleaved(num_ranks, num_microbatches, more)
        whole = -(-num_microbatches // (group or num_ranks)) * (group or num_ranks)
        yield _first(interleaved(num_ranks, whole, more), num_microbatches)
    yield split_groups(num_ranks, num_microbatches, options.chunks or CHUNKS, num_ranks)
    for rows in (interleaved_zb, looped_bfs):
        yield rows(num_ranks, num_microbatches, options)


def _v(num_ranks: int, num_microbatches: int, options: Options) -> Iterator[Rows]:
    for rows in (zbv, v_half, v_min, v_1f1b):
        for number in (num_microbatches, num_microbatches + 1):
            yield _first(rows(num_ranks, number, DEFAULTS), num_microbatches)
    number = max(num_microbatches, 2 * num_ranks)
    yield _first(dualpipev(num_ranks, number + number % 2, DEFAULTS), num_microbatches)
    assert options.memory_limit is not None
    yield from zbv_orders(num_ranks, num_microbatches, options)


def _first(rows: Rows, num_microbatches: int) -> Rows:
    """Leave out microbatches that a step doesn't have."""
    return [[action for action in row if action != PAIR and action.index < num_microbatches] for row in rows]


KNOWN = {"plain-auto": _plain, "interleaved-auto": _looped, "v-auto": _v}
