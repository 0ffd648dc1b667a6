"""At random sizes `auto` is no slower than generators of others and schedules of ours, with equal memory.

A case is a size: ranks, microbatches, times with messages or of uneven stages, the share of a stash that is
held between I and W, and a limit from v-min's memory to twice 1F1B's. MPITRAIN_EFFORT=N tries N of 2,000.
The makespan is played by the oracle, too. What is compared has as many stages a rank.
"""

import random
import re
from typing import NamedTuple

import published_orders as others
import pytest
from conftest import EVERY
from effort import numbers
from torch_tables import operations

from mpitrain.errors import ScheduleError
from mpitrain.schedules import catalog
from mpitrain.schedules.actions import PAIR
from mpitrain.schedules.auto_choice import fastest
from mpitrain.schedules.lowering.lower import Reduction, lower
from mpitrain.schedules.options import Options, StageTimes, Times
from mpitrain.schedules.proof.check import check
from mpitrain.schedules.search.problem import TINY
from mpitrain.schedules.table import Table

SMALLEST = [14, 18, 31, 49]  # of the first sizes: a second each
SEEDS = numbers(SMALLEST, 2000)
LEAST_BLOCKS, BLOCK_OPERATIONS = 6, 6_000  # how many building blocks of a V are tried
SAME_BITS = [
    name for name, family in catalog.FAMILIES.items() if family.copies == 1 and "segments" not in family.takes
]
TORCH = {1: ("GPipe", "InterleavedZeroBubble"), 3: ("Interleaved1F1B", "InterleavedZeroBubble")}
TORCH[2] = (*TORCH[3], "LoopedBFS", "ZBVZeroBubble", "DualPipeV")


class Size(NamedTuple):
    """What is asked for. ends: what the first and the last stage take more than others, or None."""

    ranks: int
    microbatches: int
    times: Times
    late: float
    limit: float
    chunks: int | None
    ends: tuple[StageTimes, StageTimes] | None

    def stage_times(self, rank_of: tuple[int, ...]) -> tuple[StageTimes, ...]:
        """Return the times of the stages of a placement."""
        chunks = len(rank_of) // self.ranks
        even = [StageTimes(*(time / chunks for time in self.times[:3]))] * len(rank_of)
        if self.ends:
            first, last = self.ends
            even[0] = StageTimes(*map(sum, zip(even[0], first)))
            even[-1] = StageTimes(*map(sum, zip(even[-1], last)))
        return tuple(even)

    def oracle_times(self, chunks: int) -> others.Times:
        columns = map(list, zip(*self.stage_times((0,) * (self.ranks * chunks))))
        return others.Times(*columns, self.times.message)

    def options(self, **changed: float) -> Options:
        given = dict(chunks=self.chunks, times=self.times, memory_limit=self.limit, weight_memory=self.late)
        return Options(**(given | changed))


def size_of(seed: int) -> Size:
    chance = random.Random(seed)
    p = chance.randint(2, 16)
    m = chance.randint(1, 4 * p)
    times = Times(*(round(chance.uniform(5, 25), 1) for _ in range(3)), chance.choice((0, 0.5, 3)))
    late = chance.choice((1, 1, round(chance.uniform(0.2, 0.9), 2)))
    limit = chance.randint(2 * ((p + 4) // 3), 4 * p) / 2
    chunks = chance.choice((None, None, None, None, 1, 2, 3))
    ends = None
    if chance.random() < 0.25:
        ends = StageTimes(2, 1, 2), StageTimes(*(chance.uniform(0.1, 0.5) * time for time in times[:3]))
    return Size(p, m, times, late, limit, chunks, ends)


def order_of(table: Table) -> others.Order:
    return [
        [(action.kind, action.stage, action.index) for action in row if action != PAIR] for row in table.ranks
    ]


def of_torch(size: Size, chunks: int):
    """Yield PyTorch's orders, where it has one."""
    for name in TORCH[chunks]:
        p, m = size.ranks, size.microbatches
        if ("Interleaved" in name and m % max(1, m // p)) or (name == "DualPipeV" and m < 2 * p):
            continue
        cells = operations(f"Schedule{name}", p, m, chunks)
        yield (
            f"PyTorch's {name}",
            [
                [(kind, int(s), int(n)) for s, kind, n in re.findall(r"(\d+)([FBIW])(\d+)", " ".join(row))]
                for row in cells
            ],
        )


def of_others(size: Size, chance: random.Random):
    """Yield (name, chunks, order) of others' generators."""
    p, m, times, late, limit, *_ = size
    wanted = (1, 2) if size.chunks is None else (size.chunks,)
    for chunks in wanted:
        for name, order in of_torch(size, chunks):
            yield name, chunks, order
        for group in range((p + 1) // 2, p + 1) if chunks > 1 else ():
            yield f"groups of {group}", chunks, others.grouped(p, m, chunks, group)
    if 1 in wanted:
        yield "zb", 1, others.zero_bubble(p, m, times, limit, late)
    if 2 not in wanted:
        return
    yield "1f1b-v", 2, others.v_1f1b(p, m)
    if order := others.zero_bubble_v(p, m, times, 2 * max(limit, p), late):
        yield "zbv", 2, order
    blocks = list(others.v_blocks(p))
    number = len(blocks) if EVERY else max(LEAST_BLOCKS, BLOCK_OPERATIONS // (p * m))
    for block in chance.sample(blocks, min(number, len(blocks))):
        try:
            order = others.v_from_block(block, m, min(2 * p, int(2 * limit)))
        except others.DoesNotFit:
            continue
        if order:
            yield f"a V of {block[0]}", 2, order


def of_ours(size: Size):
    """Yield our schedules of so many stages a rank, planned with the same if they plan."""
    for name in SAME_BITS:
        takes = catalog.FAMILIES[name].takes
        if takes and "chunks" not in takes and "times" not in takes:
            continue
        chunks = catalog.chunks_of(name, size.chunks if name in catalog.LOOPED else None)
        if size.chunks not in (None, chunks) or "stage_times" in takes:
            continue
        try:
            table = catalog.build(
                name, size.ranks, size.microbatches, size.options(chunks=chunks).only(takes)
            )
        except ScheduleError:
            continue
        yield name, chunks, order_of(table)


@pytest.mark.parametrize("seed", SEEDS)
def test_auto_is_behind_no_generator_with_equal_memory(seed):
    size = size_of(seed)
    stages_of = size.stage_times if size.ends else None
    choice = fastest(size.ranks, size.microbatches, size.options(), stages_of)
    table, makespan = choice.table, choice.played.timeline.makespan
    check(lower(table, [Reduction(1, ())] * table.num_stages), table.num_stages, table.num_microbatches)
    order, chunks = order_of(table), table.num_stages // size.ranks
    if not any(PAIR in row for row in table.ranks):  # whose messages wait for both
        assert others.played(order, size.oracle_times(chunks))[0] == pytest.approx(makespan)
    assert others.peak(order, size.late) <= size.limit * chunks + 1e-9
    faster = []
    for name, chunks, order in (*of_others(size, random.Random(seed)), *of_ours(size)):
        if others.peak(order, size.late) <= size.limit * chunks + 1e-9:
            theirs, _ = others.played(order, size.oracle_times(chunks))
            if makespan > theirs * (1 + 1e-9):
                faster.append(f"{name} {theirs:.6g}")
    assert not faster, f"{size}: {choice.name} {makespan:.6g} is slower than {', '.join(faster)}"


@pytest.mark.parametrize("seed", SEEDS)
def test_more_memory_or_fewer_microbatches_cost_no_time(seed):
    size, chance = size_of(seed), random.Random(-seed)
    stages_of = size.stage_times if size.ends else None

    def makespan(microbatches: int, limit: float) -> float:
        asked = size.options(memory_limit=limit)
        return fastest(size.ranks, microbatches, asked, stages_of).played.timeline.makespan

    least = makespan(size.microbatches, size.limit)
    limit, more = size.limit, size.limit * chance.choice((1, 1.25, 2)) + chance.choice((0.5, 1, 2))
    if 3 * 3 * size.ranks * size.microbatches > TINY:  # of larger steps these limits alone
        limit, more = size.ranks, 2 * size.ranks
    with_less = least if limit == size.limit else makespan(size.microbatches, limit)
    assert makespan(size.microbatches, more) <= with_less * (1 + 1e-9), f"{size}: with {more} for {limit}"
    fewer = max(1, size.microbatches - chance.choice((1, 2, size.ranks)))
    assert makespan(fewer, size.limit) <= least * (1 + 1e-9), f"{size}: with {fewer} microbatches"
