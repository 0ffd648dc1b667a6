"""The table of conditions: what it says of ranks that agree, and whom it names where they don't."""

import os

import numpy as np
import pytest
from conftest import agree

from mpitrain.cluster.preflight import (
    MeasuredLink,
    _clocks,
    _devices,
    _space,
    bandwidth,
    describe,
    look,
    receiver,
)
from mpitrain.commands.inspect import planned
from mpitrain.errors import CheckpointError

TINY = (
    "model.layers=4",
    "model.width=32",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn=64",
    "batch.global=8",
)


def ring(speeds):
    """Return the links of an axis of 8 ranks on nodes of 2: a link is as fast as the slower of its
    two nodes.
    """
    links = []
    for rank in range(8):
        ranks = (rank - 1) % 8, rank
        nodes = tuple(f"n{each // 2}" for each in ranks)
        links.append(MeasuredLink(ranks, nodes, min(speeds.get(node, 8e9) for node in nodes)))
    return links


def test_a_slow_node_is_named_and_its_neighbours_are_not():
    found = bandwidth("dp", ring({"n2": 1e9}))
    assert not found.fine and found.found.endswith("slow: n2 1 GB/s") and "8 GB/s" in found.found
    assert bandwidth("dp", ring({})).fine and bandwidth("dp", ring({"n2": 5e9})).fine


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
def test_in_a_turn_no_rank_has_two_links_and_in_both_every_link_has_one(size):
    every = []
    for turn in range(2):
        links = [
            (rank, receiver(rank, size, turn))
            for rank in range(size)
            if receiver(rank, size, turn) is not None
        ]
        ends = [end for link in links for end in link]
        assert len(ends) == len(set(ends))
        every += links
    assert sorted(every) == [(rank, (rank + 1) % size) for rank in range(size if size % 2 == 0 else size - 1)]


def test_a_clock_that_is_off_is_named_with_its_node():
    rounds = np.array([100.0, 101.0, 102.0])
    # ranks leave a barrier late, and so does rank 0
    late = [rounds + 0.02, rounds + 0.001, rounds + 3.4, rounds + 3.5]
    found = _clocks(["a", "a", "b", "b"], [[100.02, 101.0, 102.0], *late[1:]])
    assert not found.fine and found.found == "b by +3.4 s off rank 0's: synchronise them"
    found = _clocks(["a", "b"], [list(rounds), [100.3, 101.002, 102.2]])
    assert found.fine and found.found == "within 0.002 s of rank 0's"


def test_a_node_with_another_device_is_named():
    found = _devices(["a", "a", "b"], ["H100", "H100", "CPU"])
    assert not found.fine and found.found == "2 x H100, 1 x CPU; not H100 on b"
    assert _devices(["a", "b"], ["CPU", "CPU"]) == ("devices", "2 x CPU", True)


def test_a_file_system_that_cant_hold_a_checkpoint_is_refused(tmp_path):
    assert _space(planned(None, TINY, 1), tmp_path).fine
    with pytest.raises(
        CheckpointError, match=r"GB free, a checkpoint takes up to 8\.1e\+03 GB; free some space"
    ):
        _space(planned(None, ("model.preset=deepseek-v3",), 1), tmp_path)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2, 4)
def test_what_ranks_that_agree_hear(world, tmp_path_factory):
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.comm.base.world import World

    size = world.size
    plan = planned(None, (*TINY, f"parallel.tp={2 if size == 4 else 1}", "parallel.zero=1"), size)
    of_job = World(world, RankStatus())
    found = {
        name: (text, fine)
        for name, text, fine in look(of_job, plan, tmp_path_factory.mktemp("run"), "CPU", measure=True)
    }
    axes = {"axis shard", "axis data"} if size == 2 else {"axis tp", "axis shard", "axis data", "axis model"}
    problems = []
    if not {"ranks", "code", "space", "clocks", "devices"} | axes <= set(found):
        problems.append(f"found {sorted(found)}")
    if found["devices"] != (f"{size} x CPU", True) or not found["ranks"][0].startswith(f"{size} on 1 node"):
        problems.append(f"{found['devices']}, {found['ranks']}")
    if not all(fine for _, fine in found.values()):
        problems.append(f"marked: {found}")
    problems += [
        f"{axis}: {found[axis]}" for axis in axes if axis in found and " GB/s, lowest " not in found[axis][0]
    ]
    quiet, said = (
        describe(of_job, plan, tmp_path_factory.mktemp("run"), "CPU", measure=measure)
        for measure in (False, True)
    )
    if quiet or not said.startswith("preflight, in "):  # one node, and nothing is wrong
        problems.append(f"{quiet!r}, {said!r}")
    agree(world, not problems, problems)


@pytest.mark.mpi(min_size=2)
@pytest.mark.sizes(2)
def test_a_node_has_the_cores_that_its_ranks_may_use(world):
    """Launchers bind ranks, and batch systems whole jobs: not all cores that there are."""
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.comm.base.world import World

    given = os.sched_getaffinity(0)
    mine = sorted(given)[world.rank % len(given)]
    try:
        os.sched_setaffinity(0, {mine})
        bound = World(world, RankStatus())
    finally:
        os.sched_setaffinity(0, given)
    expected = len(set(world.allgather(mine)))
    agree(world, bound.node_cores == expected, f"{bound.node_cores}, not {expected}")
    bound.node.Free()
