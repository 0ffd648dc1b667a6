"""Which ranks share an axis, held against lists of all of them; and that an axis says what it carries."""

import itertools
import time

import pytest
from conftest import WITH_LONG
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.comm.base.axis_operations import NOTHING
from mpitrain.comm.base.grid import Grid
from mpitrain.plan.axes import MEANINGS, Axes

GRID = ("tp", "cp", "dp", "pp")


@st.composite
def layouts(draw):
    """Draw the axes of a layout of at most a few hundred ranks."""
    tp, cp, dp, pp = (draw(st.integers(1, 5)) for _ in GRID)
    dp_shard = draw(st.sampled_from([n for n in range(1, dp + 1) if dp % n == 0]))
    ends = draw(st.sampled_from([(), (0,), (pp - 1,), (0, pp - 1), (pp - 1, 0)]))

    def divisor(number):
        return draw(st.sampled_from([n for n in range(1, number + 1) if number % n == 0]))

    inside = divisor(tp * cp * dp)
    folded = draw(st.sampled_from([None, (inside, 1, divisor(tp * cp * dp // inside))]))
    return Axes(
        grid=Grid({"tp": tp, "cp": cp, "dp": dp, "pp": pp}),
        divided=draw(st.sampled_from([1, cp * dp_shard])),
        repeats=draw(st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0])),
        ends=tuple(dict.fromkeys(ends)),
        mirrored=draw(st.booleans()),
        matrices=draw(st.booleans()),
        context="ring",
        folded=folded,
        near=draw(st.sampled_from([0, divisor(inside)])) if folded else 0,
    )


def listed(axes):
    """Return {axis: its groups of ranks} by looking at every rank, nothing but its place counted
    out by hand.
    """
    tp, cp, dp, pp = axes.grid.degrees.values()
    ep, _, shards = axes.folded or (1, 1, 1)
    near = axes.near or 1
    # tp fastest: in the order of ranks
    places = list(itertools.product(range(pp), range(dp), range(cp), range(tp)))

    def sharing(key, order=lambda place: 0):
        """Group the ranks that have the same key; ranks in the order of `order`, then in their own."""
        groups = {}
        for rank, place in enumerate(places):
            groups.setdefault(key(*place), []).append(rank)
        return [
            tuple(sorted(ranks, key=lambda rank: (order(places[rank]), rank))) for ranks in groups.values()
        ]

    def shard(d, c):
        return (c + cp * d) // axes.divided

    def both(one, other):
        """Two pipeline ranks, everywhere along the other axes; whoever is on neither is alone."""
        if one == other:
            return []
        by_place = {place: rank for rank, place in enumerate(places)}
        return [(by_place[one, *rest], by_place[other, *rest]) for p, *rest in places if p == one]

    def fold(d, c, t):
        """The place among the ranks of a pipeline rank, as group of experts and place in it."""
        return divmod(t + tp * (c + cp * d), ep)

    def folded(key):
        return sharing(lambda p, d, c, t: (p, *key(*fold(d, c, t)))) if axes.folded else []

    return {
        "tp": sharing(lambda p, d, c, t: (p, d, c)),
        "cp": sharing(lambda p, d, c, t: (p, d, t)),
        "dp": sharing(lambda p, d, c, t: (p, c, t)),
        "pp": sharing(lambda p, d, c, t: (d, c, t)),
        "data": sharing(lambda p, d, c, t: (p, t)),
        "links": sharing(lambda p, d, c, t: (d, c, t)),
        "model": sharing(lambda p, d, c, t: (d, c)),
        "tied": both(*axes.ends) if len(axes.ends) == 2 else [],
        "mirror": [pair for p in range(pp // 2) for pair in both(p, pp - 1 - p)] if axes.mirrored else [],
        "shard": sharing(lambda p, d, c, t: (p, t, shard(d, c))),
        "replicate": sharing(lambda p, d, c, t: (p, t, (c + cp * d) % axes.divided)),
        "kv": sharing(lambda p, d, c, t: (p, d, c, t // axes.repeats)),
        "matrix": sharing(lambda p, d, c, t: (p, shard(d, c)), order=lambda place: place[-1])
        if axes.matrices
        else [],
        "tokens": sharing(lambda p, d, c, t: (p, d)) if axes.folded else [],
        "experts": folded(lambda group, place: (group,)),
        "experts_near": folded(lambda group, place: (group, place // near)) if axes.near else [],
        "experts_far": folded(lambda group, place: (group, place % near)) if axes.near else [],
        "expert_shard": folded(lambda group, place: (place, group // shards)),
        "expert_replicate": folded(lambda group, place: (place, group % shards)),
        "expert_matrix": folded(lambda group, place: (place, group // shards)) if axes.matrices else [],
    }


@settings(deadline=None, max_examples=100 if WITH_LONG else 30)
@given(layouts())
def test_the_ranks_of_each_axis_are_those_that_a_list_of_all_has(axes):
    every = listed(axes)
    for rank in range(axes.grid.size):
        expected = {
            name: next((ranks for ranks in groups if rank in ranks), (rank,))
            for name, groups in every.items()
        }
        found = {name: tuple(ranks) for name, ranks in axes.of(rank).items()}
        assert found == expected and list(found) == list(expected)


@settings(deadline=None)
@given(layouts())
def test_an_axis_carries_something_if_and_only_if_ranks_share_it(axes):
    shared = {name for name, groups in listed(axes).items() if any(len(ranks) > 1 for ranks in groups)}
    carrying = {name for name, carried in axes.carried.items() if carried != NOTHING}
    assert carrying <= MEANINGS.keys()  # the table at the end of a run explains its axes
    # these are coordinates; they meet as data, shard and links
    assert carrying == shared - {"dp", "pp"}


@pytest.mark.parametrize("degrees", [(8, 1, 2**13, 16), (8, 2, 2**16, 1), (1, 1, 2**20, 1), (8, 8, 1, 2**14)])
@pytest.mark.parametrize("zero", [False, True])
def test_a_rank_among_a_million_finds_its_axes_at_once(degrees, zero):
    tp, cp, dp, pp = degrees
    grid = Grid(dict(zip(GRID, degrees)))
    assert grid.size == 2**20
    axes = Axes(grid, cp * dp if zero else 1, tp, (0, pp - 1) if pp > 1 else (0,), pp > 1, True, "zigzag")
    begin = time.process_time()
    found = axes.of(777_777)
    assert time.process_time() - begin < 1
    assert all(777_777 in ranks for ranks in found.values())
