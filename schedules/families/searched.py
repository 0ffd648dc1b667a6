"""Orders that are searched for: the shortest step with given times and a memory limit, for each placement.

plain-auto         a stage a rank
interleaved-auto   chunks in loops
v-auto             a V, there and back

All orders of the same placement that have a name take part in the search (see search/improve), so
that none of them that fits is shorter. A limit is met from one stash of a rank's whole share on. Where
`options.recompute` or `options.offload` allow it, stashes that don't fit are recomputed or
offloaded (see search/recomputation) if that is shorter.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

from mpitrain.errors import ScheduleError
from mpitrain.schedules.families.dualpipe import dualpipev
from mpitrain.schedules.families.gpipe import GPIPE
from mpitrain.schedules.families.interleaved import (
    CHUNKS,
    interleaved,
    interleaved_zb,
    looped_bfs,
    smallest_group,
)
from mpitrain.schedules.families.one_f_one_b import EAGER_1F1B, ONE_F_ONE_B
from mpitrain.schedules.families.v_1f1b import v_1f1b
from mpitrain.schedules.families.v_blocks import v_orders
from mpitrain.schedules.families.v_half import v_half, v_min
from mpitrain.schedules.families.zb_auto import SearchPlan, planned, zb_auto
from mpitrain.schedules.families.zbv import zbv
from mpitrain.schedules.families.zbv_auto import zbv_auto
from mpitrain.schedules.families.zero_bubble import ZB_H1, ZB_H2
from mpitrain.schedules.family import Rows, ScheduleFamily
from mpitrain.schedules.limits import require_searchable
from mpitrain.schedules.options import DEFAULTS, Options, StageTimes
from mpitrain.schedules.search.improve import num_plays, search, search_recomputed
from mpitrain.schedules.search.problem import Problem, is_large, stage_costs
from mpitrain.schedules.search.timed_order import shortest
from mpitrain.schedules.search_progress import REMEMBERED, Listener

MOST_BLOCKS = 100  # building blocks of a V that take part
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


def _searched(name: str, num_ranks: int, num_microbatches: int, chunks: int, options: Options) -> Rows:
    require_searchable(name, num_ranks, num_microbatches)
    plan = planned(name, options, memory_limit=num_ranks)
    if not plan.memory_limit >= 1:
        raise ScheduleError(
            f"{name}: found a memory limit of {plan.memory_limit} stashes, needed at least 1, a "
            "microbatch in flight; raise the limit"
        )
    stages = options.stage_times
    if stages is not None and len(stages) != num_ranks * chunks:
        raise ScheduleError(
            f"{name}: found times of {len(stages)} stages, needed {num_ranks * chunks}: {chunks} a rank"
        )
    listener = Listener(options.notify)
    copy = None if options.offload is None else options.offload / chunks
    freed = options.recompute, copy
    return _remembered(name, num_ranks, num_microbatches, chunks, plan, stages, freed, listener)


@lru_cache(REMEMBERED)
def _remembered(
    name: str,
    num_ranks: int,
    num_microbatches: int,
    chunks: int,
    plan: SearchPlan,
    stages: tuple[StageTimes, ...] | None,
    freed: tuple[float | None, float | None],
    listener: Listener,
) -> Rows:
    there = tuple(range(num_ranks))
    rank_of = there + there[::-1] if name == "v-auto" else there * chunks
    problem = Problem(
        stage_costs(rank_of, plan.times, stages),
        num_microbatches,
        plan.memory_limit * chunks,
        plan.weight_memory,
    )
    known = {"plain-auto": _plain, "interleaved-auto": _looped, "v-auto": _v}[name]
    rows = search(problem, known(num_ranks, num_microbatches, chunks, plan), listener.notify)
    problem = problem.freeing(*freed)
    if not problem.frees:
        return rows
    roomy = plan._replace(memory_limit=max(plan.memory_limit, num_ranks))
    orders = chain([rows], known(num_ranks, num_microbatches, chunks, roomy))
    again = search_recomputed(problem, orders, listener.notify)
    best = shortest(problem, [rows, *([again] if again else [])])
    assert best is not None
    return list(map(list, best))


# ---------------------------------------------------------------- orders that have a name


def _plain(num_ranks: int, num_microbatches: int, _: int, plan: SearchPlan) -> Iterator[Rows]:
    for family in (GPIPE, ONE_F_ONE_B, EAGER_1F1B, ZB_H1, ZB_H2):
        yield family.rows(num_ranks, num_microbatches, DEFAULTS)
    yield zb_auto(num_ranks, num_microbatches, DEFAULTS._replace(**plan._asdict()))


def _looped(num_ranks: int, num_microbatches: int, chunks: int, _: SearchPlan) -> Iterator[Rows]:
    options = DEFAULTS._replace(chunks=chunks)
    groups = range(smallest_group(num_ranks), min(2 * num_ranks, num_microbatches) + 1)
    if is_large(num_ranks * chunks, num_microbatches):
        groups = groups[:: max(num_ranks // 2, 1)]  # p/2, p, 3p/2, 2p: each takes seconds
    for group in chain((None,), groups):
        yield interleaved(num_ranks, num_microbatches, options._replace(group=group))
    for rows in (interleaved_zb, looped_bfs):
        yield rows(num_ranks, num_microbatches, options)


def _v(num_ranks: int, num_microbatches: int, _: int, plan: SearchPlan) -> Iterator[Rows]:
    for rows in (zbv, v_half, v_min, v_1f1b):
        yield rows(num_ranks, num_microbatches, DEFAULTS)
    if num_microbatches >= 2 * num_ranks:
        yield dualpipev(num_ranks, num_microbatches, DEFAULTS)
    if plan.memory_limit >= min(num_ranks, num_microbatches):
        yield zbv_auto(num_ranks, num_microbatches, DEFAULTS._replace(**plan._asdict()))
    number = min(MOST_BLOCKS, num_plays(6 * num_ranks * num_microbatches))
    yield from v_orders(num_ranks, num_microbatches, 2 * plan.memory_limit, number)
