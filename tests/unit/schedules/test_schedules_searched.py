"""The schedules whose order is searched for: never slower than what is published, within any limit."""

import random

import published_orders
import pytest
from conftest import but_for
from support.quick_schedules import NAMES, SEARCHED

from mpitrain.errors import ScheduleError
from mpitrain.schedules import families
from mpitrain.schedules.catalog import build
from mpitrain.schedules.families.v_blocks import published_v_orders
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.options import Options, Times
from mpitrain.schedules.play.simulate import simulate_table
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.search.problem import Problem, stage_costs
from mpitrain.schedules.search.timed_order import OrderedPlay, order_of

# ranks, microbatches, times, stashes of a rank's whole share, and the makespan that a generator of
# sail-sg/zero-bubble-pipeline-parallelism has with them: grouped interleaved, a V for a limit, 1F1B-V
PUBLISHED = [
    (8, 32, Times(10, 20, 10, 3), 7.5, 1566),
    (8, 32, Times(10, 20, 10, 3), 6.5, 1608),
    (8, 32, Times(10, 20, 10, 3), 6, 1707),
    (5, 15, Times(10, 20, 10, 3), 4.5, 749),
    (5, 15, Times(30, 40, 20, 0), 4, 1515),
    (4, 16, Times(18.5, 18.1, 9.3, 0.6), 2.5, 983),
    (4, 5, Times(10, 20, 10, 3), 3, 320),
    (2, 6, Times(1, 1, 1, 0), 1.5, 19.5),
    (6, 22, Times(10, 20, 10, 3), 5, 1209),
    (6, 22, Times(18.5, 18.1, 9.3, 0.6), 4.5, 1138),
    (5, 10, Times(18.5, 18.1, 9.3, 0.6), 3.5, 579.2),
    (15, 32, Times(12.9, 14.6, 13, 0), 7, 1698.6),  # of a warmup that ours don't have
    (16, 6, Times(13.8, 17.5, 24, 3), 6, 804.3),  # whose W end a third of their time after a message comes
    (5, 2, Times(11, 18.3, 22.4, 3), 2, 226.05),  # of a block that holds more with many microbatches
    (16, 5, Times(12, 21.3, 21.5, 0), 5, 629.55),  # whose W end a little after a message comes
]
FEW = [*PUBLISHED[5:8], *PUBLISHED[-3:]]
SHORT = [
    (3, 4, Times(20, 18, 10, 0), 3, 212),
    (4, 4, Times(20, 18, 10, 0), 4, 224),
    (4, 4, Times(10, 20, 10, 4), 2, 322),
    (4, 6, Times(10, 20, 10, 4), 2, 454),
    (4, 8, Times(10, 20, 10, 4), 2, 581),
]
FIXED = {
    "plain-auto": ("1f1b", "zb-h1", "zb-h2", "zb-auto"),
    "interleaved-auto": ("interleaved", "interleaved-zb"),
    "v-auto": ("zbv", "v-half", "v-min", "1f1b-v", "zbv-auto"),
}


def searched(name, num_ranks, num_microbatches, times, limit):
    """Return the timeline of a searched order, proved, and within the limit."""
    options = Options(times=times, memory_limit=limit, weight_memory=1)
    table = build(name, num_ranks, num_microbatches, options)
    check(lower(table, [Reduction(1, ())] * table.num_stages), table.num_stages, table.num_microbatches)
    timeline = simulate_table(table, times)
    chunks = table.num_stages // num_ranks
    assert max(map(timeline.peak_in_flight, range(num_ranks))) <= limit * chunks
    return timeline


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "times", "limit", "makespan"),
    but_for(PUBLISHED, longer=[case for case in PUBLISHED if case not in FEW]),
)
def test_none_that_is_published_is_shorter_with_its_memory(
    num_ranks, num_microbatches, times, limit, makespan
):
    found = [
        searched(name, num_ranks, num_microbatches, times, limit).makespan
        for name in ("v-auto", "interleaved-auto")
    ]
    assert min(found) <= makespan * (1 + 1e-9)


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "times", "limit", "makespan"), but_for(SHORT, longer=SHORT[3:])
)
def test_orders_that_are_played_later_make_no_step_longer(
    num_ranks, num_microbatches, times, limit, makespan
):
    """A V with few microbatches, for which blocks with a tight cooldown are a help or in the way."""
    assert searched("v-auto", num_ranks, num_microbatches, times, limit).makespan <= makespan


@pytest.mark.parametrize(
    ("num_ranks", "num_microbatches", "times", "limit", "makespan"),
    [
        (3, 9, Times(1, 1, 1, 0), 2, 29.5),
        (4, 4, Times(1, 1, 1, 0), 2.5, 16),
        (4, 8, Times(1, 1, 1, 0), 3, 26.5),
        (5, 12, Times(10, 20, 10, 3), 3.5, 733),
        (7, 14, Times(3, 4, 3, 0), 4.5, 171.5),
    ],
)
def test_the_best_published_order_of_all_blocks_takes_part(
    num_ranks, num_microbatches, times, limit, makespan
):
    """As v_auto_schedule.py has them; tests/oracles/published_orders.py finds the same best of all."""
    stages = published_orders.Times(*([time / 2] * 2 * num_ranks for time in times[:3]), times.message)
    orders = [
        [[(action.kind, action.stage, action.index) for action in row] for row in rows]
        for rows in published_v_orders(num_ranks, num_microbatches, 2 * limit, 100)
    ]
    fitting = [order for order in orders if published_orders.peak(order, 1) <= 2 * limit]
    assert min(published_orders.played(order, stages)[0] for order in fitting) == pytest.approx(makespan)


def test_groups_of_as_many_as_ranks_take_part_with_split_backwards():
    """As group_interleaved_1f1b.py of the same repository has them: 381.575."""
    times = Times(7.9, 5.2, 12.5, 3)
    options = Options(4, times=times, memory_limit=5, weight_memory=0.5)
    assert simulate_table(build("interleaved-auto", 5, 9, options), times).makespan <= 381.575 + 1e-9


@pytest.mark.parametrize("seed", but_for(range(40), longer=range(4, 40)))
def test_no_named_schedule_that_fits_is_shorter(seed):
    chance = random.Random(seed)
    num_ranks, times = chance.randint(2, 4), Times(*(chance.randint(1, 9) for _ in range(4)))
    num_microbatches = chance.randint(1, 2 * num_ranks)
    limit = chance.choice((1, 1.5, num_ranks / 2 + 1, num_ranks, 2 * num_ranks))
    for name, others in FIXED.items():
        mine = searched(name, num_ranks, num_microbatches, times, limit)
        for other in others:
            options = Options(times=times, memory_limit=limit, weight_memory=1)
            try:
                table = build(other, num_ranks, num_microbatches, options if "auto" in other else Options())
            except ScheduleError:
                continue
            theirs = simulate_table(table, times)
            chunks = table.num_stages // num_ranks
            if max(map(theirs.peak_in_flight, range(num_ranks))) <= limit * chunks:
                assert mine.makespan <= theirs.makespan * (1 + 1e-9), f"{name} for {other}"


@pytest.mark.parametrize("name", ["zb-auto", "zbv-auto", *SEARCHED])
def test_more_memory_costs_no_time(name):
    times = Times(1, 2, 1, 0.2)
    spans = []
    for limit in (1, 2, 3, 4, 6):
        options = Options(times=times, memory_limit=limit, weight_memory=1)
        spans.append(simulate_table(build(name, 3, 6, options), times).makespan)
    assert spans == sorted(spans, reverse=True)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("dualpipe", "dualpipev", "seq1f1b")])
def test_no_order_is_shorter_than_the_bound(name):
    times = Times(3, 5, 2, 1)
    for num_ranks, num_microbatches in ((2, 1), (3, 5), (4, 8), (5, 7)):
        table = build(name, num_ranks, num_microbatches)
        held = max(map(simulate_table(table).peak_in_flight, range(num_ranks)))
        problem = Problem(stage_costs(table.rank_of, times), num_microbatches, held)
        plan = OrderedPlay(problem, order_of(table.ranks)).play()
        assert plan is not None and plan.makespan >= problem.bound * (1 - 1e-9)
        assert problem.bound >= num_microbatches * sum(times[:3])


@pytest.mark.parametrize("name", SEARCHED)
def test_what_cannot_be_is_refused(name):
    with pytest.raises(
        ScheduleError, match=f"{name}: found a memory limit of 0.5 stashes, needed at least 1"
    ):
        build(name, 4, 8, Options(memory_limit=0.5))


def test_memory_for_more_than_all_microbatches_costs_no_time():
    times = Times(10.4, 10.2, 7.7, 0.4)
    spans = [searched("v-auto", 3, 4, times, limit).makespan for limit in (4, 5, 60)]
    assert len(set(spans)) == 1


@pytest.mark.parametrize("name", SEARCHED)
def test_the_same_order_is_found_again(name):
    options = Options(times=Times(10.4, 10.2, 7.7, 0.4), memory_limit=2)
    first = build(name, 3, 7, options)
    families.searched._within.cache_clear()  # else it would be remembered
    assert build(name, 3, 7, options) == first
