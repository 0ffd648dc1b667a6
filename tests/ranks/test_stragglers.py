"""Slow ranks and links, of what was measured; and that waits are counted by the rank that is waited for."""

import random
import time

import pytest
from conftest import agree

from mpitrain.training.checks.stragglers import Busy, slow_links, slow_ranks


def busy(times: list[float], groups: list[int], work: list[float] | None = None) -> list[Busy]:
    work = work or [1.0] * len(times)
    return [
        Busy(f"node{rank // 2}", group, t * 0.95, t, w)
        for rank, (t, group, w) in enumerate(zip(times, groups, work))
    ]


def test_a_rank_that_takes_twice_as_long_as_those_with_its_work_is_named():
    every = busy([1.0, 1.05, 2.0, 0.98], [0, 0, 0, 0])
    every[3] = every[3]._replace(waits=((2, 0.9), (0, 0.01)))
    (text,) = slow_ranks(every)
    assert text.startswith("rank 2 on node1 is slow: busy 2.0 times") and "rank 3 900 ms a step" in text


@pytest.mark.parametrize(("slow", "times"), [(0, [2.0, 1.0]), (1, [1.0, 2.0])])
def test_of_two_the_faster_one_is_the_measure(slow, times):
    (text,) = slow_ranks(busy(times, [0, 0]))
    assert text.startswith(f"rank {slow} ")


def test_stages_with_more_work_are_not_slow_for_that():
    assert slow_ranks(busy([1.0, 1.0, 1.0, 2.0], [0, 1, 2, 3], [1.0, 1.0, 1.0, 2.0])) == []
    assert len(slow_ranks(busy([1.0, 1.0, 1.0, 4.0], [0, 1, 2, 3], [1.0, 1.0, 1.0, 2.0]))) == 1
    assert slow_ranks(busy([1.0, 1.1, 5.0, 5.1], [0, 0, 1, 1])) == []
    assert slow_ranks(busy([3.0], [0])) == []


def test_noise_names_nobody():
    """Times of 4 ranks on a machine that interrupts any of them, up to four times as long, in 30%
    of the steps.
    """
    from statistics import quantiles

    dice = random.Random(1)
    for _ in range(200):
        steps = [
            [(1 + 3 * dice.random() * (dice.random() < 0.3)) * (1 + 0.1 * dice.random()) for _ in range(50)]
            for _ in range(4)
        ]
        every = [Busy("node", 0, *quantiles(each, n=4)[:2], 1.0) for each in steps]
        assert slow_ranks(every) == []


def test_a_link_is_slow_compared_with_others_and_with_its_own_past():
    assert slow_links([(0, 2, 1e8), (2, 4, 1e7), (4, 6, 1.2e8), (6, 0, 9e7)], {}) == [(2, 4, 1e7, 1e8)]
    assert slow_links([(0, 2, 1e7)], {(0, 2): [1e8, 1.1e8]}) == [(0, 2, 1e7, 1e8)]
    assert slow_links([(0, 2, 6e7)], {(0, 2): [1e8, 1.1e8]}) == [] == slow_links([(0, 2, 1e7)], {})


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_a_window_of_steps_names_who_was_slow_and_the_summary_how_often(world):
    from training import resolved

    from mpitrain.actor.communicators import build_mesh
    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.training.checks.stragglers import Stragglers

    plan = plan_of(resolved(world, "parallel.dp=2", "comm.slow_after=4"))
    mesh = build_mesh(plan, world)
    said = []
    watching = Stragglers(plan, mesh, World(world, NULL_REPORTER), said.append)
    for step in range(1, 13):
        watching.step(step, 2.5, 0.5 if world.rank == 1 and step <= 8 else 1.5)
    agree(world, [text.partition(" on ")[0] for text in said] == ["step 4: rank 1", "step 8: rank 1"], said)
    agree(world, watching.summary().endswith(" is slow, 2 of 3 times"), watching.summary())
    mesh.free()


@pytest.mark.mpi
@pytest.mark.sizes(2)
@pytest.mark.parametrize("transport", ["messages", "shared", "collectives"])
def test_waits_are_counted_by_the_rank_that_is_waited_for(world, transport):
    """Of its own collectives MPI doesn't tell for whom they wait: all others share the time."""
    import numpy as np

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": world.size}), transport=transport, timeout_s=60)
    all_reduce(np.zeros(4), mesh["dp"]).wait()
    late = world.size - 1
    before = mesh.progress.waited_for()
    world.Barrier()
    if world.rank == late:
        time.sleep(0.5)
    all_reduce(np.zeros(100_000), mesh["dp"]).wait()
    found = {rank: seconds - before.get(rank, 0.0) for rank, seconds in mesh.progress.waited_for().items()}
    most = max(found, key=found.get, default=None)
    least_s = 0.3 / (world.size - 1) if transport == "collectives" else 0.3
    known = transport == "collectives" or most == late
    agree(world, world.rank == late or (known and found[late] > least_s and world.rank not in found), found)
    mesh.free()


@pytest.mark.mpi(min_size=2)
def test_links_between_nodes_are_measured(world):
    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.comm.meters.link_speed import between_nodes

    everyone = World(world, NULL_REPORTER)
    found = between_nodes(everyone)
    agree(world, found == [] if everyone.num_nodes == 1 else all(speed > 0 for *_, speed in found), found)
