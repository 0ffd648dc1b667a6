"""The communicators of a layout.

Who shares an axis, in which order, what is made for it, and that nothing is left behind.
"""

from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import agree

pytestmark = pytest.mark.mpi


def test_every_axis_has_its_ranks_in_order(world):
    """Those of a grid, some that join several of its axes, and one of another grid, folded over the
    same ranks.
    """
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    degrees = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 4)}.get(world.size, (world.size, 1))
    grid = Grid({"tp": degrees[0], "cp": 1, "dp": 1, "pp": degrees[1]})
    folded = Grid({"ep": degrees[0], "edp": 1, "pp": degrees[1]})
    axes = {name: grid.group(world.rank, name) for name in grid.degrees} | {
        "ep": folded.group(world.rank, "ep")
    }
    axes |= {
        "data": grid.group(world.rank, "cp", "dp"),
        "model": grid.group(world.rank, "tp", "pp"),
        "back": range(world.size)[::-1],
    }
    mesh = Mesh(world, grid, axes)
    wrong = []
    for name, axis in mesh.axes.items():
        found = axis.comm.allgather(world.rank)
        wrong += (
            []
            if found == list(axes[name]) and found[axis.rank] == world.rank and axis.size == len(found)
            else [name]
        )
        wrong += [] if axis.size == 1 or axis.comm.Get_name() == f"mpitrain.{name}" else [f"name of {name}"]
    wrong += (
        [] if mesh["data"].size == 1 and mesh["model"].size == world.size == mesh["back"].size else ["sizes"]
    )
    mesh.free()
    agree(world, not wrong, f"wrong: {wrong}")


def test_ranks_of_a_node_share_the_cores_that_each_may_run_on(world, monkeypatch):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": world.size}))
    for cores, expected in ((16, 16 // world.size), (1, 1)):
        monkeypatch.setattr("os.sched_getaffinity", lambda pid, cores=cores: set(range(cores)))
        agree(world, mesh.cores_of_rank == expected, f"{mesh.cores_of_rank} of {cores}")
    mesh.free()


def test_an_axis_that_only_some_ranks_share_leaves_the_others_alone(world):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    ends = (0, world.size - 1) if world.size > 1 else (0,)
    mine = ends if world.rank in ends else (world.rank,)
    mesh = Mesh(world, Grid({"pp": world.size}), {"tied": mine})
    expected = len(mine)
    found = mesh["tied"].size
    mesh.free()
    agree(world, found == expected, f"size {found}, expected {expected}")


@pytest.fixture
def counted(world, monkeypatch):
    """Count what is made and freed, whoever does it: communicators of those of this world, and windows.

    Not the one of a node, by Split_type, of which a mesh asks who is on it and which is freed at
    once.
    """
    from mpi4py import MPI

    from mpitrain.comm.transports import window

    made = Counter()
    freed = Counter()

    class Counting(MPI.Intracomm):
        def Split(self, *arguments):
            return self._counted(super().Split(*arguments))

        def Dup(self, *arguments):
            return self._counted(super().Dup(*arguments))

        def Free(self):
            freed["communicators"] += 1
            super().Free()

        def _counted(self, comm):
            made["communicators"] += comm != MPI.COMM_NULL
            return Counting(comm)  # the same one

    class CountingWindow(window.Window):
        def __init__(self, *arguments):
            made["windows"] += 1
            super().__init__(*arguments)

        def free(self):
            freed["windows"] += 1
            super().free()

    monkeypatch.setattr(window, "Window", CountingWindow)
    return SimpleNamespace(world=Counting(world), made=made, freed=freed)


@pytest.mark.parametrize(
    # of each axis that has something: c a communicator, s a second one, w a window
    ("layout", "expected"),
    [
        ("parallel.dp={n} parallel.zero=0", {"data": "c", "replicate": "cw"}),
        ("parallel.dp={n} parallel.zero=2", {"data": "c", "shard": "cw"}),
        ("parallel.dp={n} parallel.zero=1 comm.transport=shared", {"data": "cw", "shard": "cw"}),
        ("parallel.dp={n} parallel.zero=1 comm.transport=collectives", {"data": "c", "shard": "c"}),
        ("parallel.dp={n} parallel.zero=0 comm.transport=collectives", {"data": "c", "replicate": "cs"}),
        ("parallel.dp={n} parallel.zero=3 optimizer.name=muon", {"data": "c", "shard": "cw", "matrix": "c"}),
        ("parallel.tp={n} model.kv_heads=4", {"tp": "cw", "model": "c"}),
        ("parallel.tp={n} model.kv_heads=1 comm.transport=messages", {"tp": "c", "model": "c", "kv": "c"}),
        (
            "parallel.cp={n} parallel.context=zigzag parallel.zero=0",
            {"cp": "c", "data": "c", "replicate": "cw"},
        ),
        (
            "parallel.cp={n} parallel.context=gather parallel.zero=0",
            {"cp": "cw", "data": "c", "replicate": "cw"},
        ),
        ("parallel.pp={n} model.tied=false", {"links": "c", "model": "c"}),
        ("parallel.pp={n} model.tied=true", {"links": "c", "model": "c", "tied": "cw"}),
        (
            "parallel.pp={n} model.tied=false pipeline.schedule=dualpipe",
            {"links": "c", "model": "c", "mirror": "cw"},
        ),
    ],
)
def test_a_mesh_makes_what_is_used_and_nothing_else(counted, layout, expected):
    from mpitrain import config as settings
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    world = counted.world
    if world.size not in (1, 2, 4):
        pytest.skip("1, 2 and 4 ranks tell")
    if world.size == 1 and "context=gather" in layout:
        pytest.skip("parallel.context does nothing on one rank, and is refused")
    sizes = ("model.layers=8", "model.heads=4", "batch.global=16", "batch.micro=1", "comm.timeout_s=200")
    words = layout.format(n=world.size).split()
    if world.size == 1:
        words = [word for word in words if "dualpipe" not in word]
        expected = {}
    if "tied" in expected and world.rank not in (0, world.size - 1):
        expected = {name: has for name, has in expected.items() if name != "tied"}
    mesh = build_mesh(plan_of(resolve(settings.load(None, (*sizes, *words)), world.size, 256)), world)
    # MPI's own COMM_SELF is there for the others
    shared = {name: axis for name, axis in mesh.axes.items() if axis.size > 1}
    found = {
        name: "c" * bool(axis.comm) + "s" * bool(axis.second) + "w" * bool(axis.window)
        for name, axis in shared.items()
    }
    text = "".join(expected.values())
    made = Counter(communicators=text.count("c") + text.count("s"), windows=text.count("w"))
    ok = {name: has for name, has in found.items() if has} == expected and counted.made == made
    mesh.free()
    ok = ok and counted.freed == made
    agree(world, ok, f"{found}, made {counted.made}, freed {counted.freed}")


def test_an_operation_that_an_axis_is_not_made_for_is_a_mistake_found_at_once(world):
    import numpy as np

    from mpitrain.comm.base.axis_operations import NOTHING, carried
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_gather, all_reduce
    from mpitrain.comm.mesh import Mesh

    every = range(world.size)
    mesh = Mesh(
        world,
        Grid({"dp": world.size}),
        {"dp": every, "sums": every},
        {"dp": NOTHING, "sums": carried("all_reduce")},
        timeout_s=30,
    )
    x = np.ones(world.size)
    refused = 0
    for operation in (lambda: all_reduce(x, mesh["dp"]), lambda: all_gather(x[:1], mesh["sums"], x)):
        try:
            operation().wait()
        except AssertionError as error:
            refused += "is made for" in str(error)
    all_reduce(x, mesh["sums"]).wait()
    mesh.free()
    agree(world, refused == 2 * (world.size > 1) and (x == world.size).all(), f"{refused} refused, {x}")


def test_a_layout_of_another_size_is_refused(world):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh
    from mpitrain.errors import MeshError

    try:
        Mesh(world, Grid({"dp": world.size + 1}))
        text = ""
    except MeshError as error:
        text = str(error)
    agree(world, f"mpirun started {world.size}" in text, text)


@pytest.mark.few_ranks
def test_communicators_are_freed(world):
    """Far more meshes than an MPI has room for communicators."""
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    for _ in range(150):
        Mesh(world, Grid({"tp": 1, "cp": 1, "dp": world.size, "pp": 1}), transport="messages").free()
    agree(world, True)


def test_a_result_of_more_than_one_gibibyte_arrives_whole(world, monkeypatch):
    """Messages are cut at a limit, here lowered: the pieces have to arrive in order and without gaps."""
    import torch

    from mpitrain.comm.base import wire
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh

    monkeypatch.setattr(wire, "LIMIT", 1000)
    mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=30)
    x = torch.arange(12_345, dtype=torch.float64)
    all_reduce(x, mesh["dp"]).wait()
    ok = torch.equal(x, torch.arange(12_345, dtype=torch.float64) * world.size)
    mesh.free()
    agree(world, ok)


def test_a_progress_thread_changes_nothing_but_who_enters_mpi(world):
    import threading

    import torch

    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=30, progress="thread")
    names = {thread.name for thread in threading.enumerate()}
    xs = [torch.full((200_000,), float(world.rank + i)) for i in range(8)]
    pending = [all_reduce(x, mesh["dp"]) for x in xs]
    for _ in range(50):
        torch.ones(300, 300) @ torch.ones(300, 300)
    for each in reversed(pending):
        each.wait()
    ok = all((x == sum(range(world.size)) + i * world.size).all() for i, x in enumerate(xs))
    mesh.free()
    ended = "mpitrain-progress" not in {thread.name for thread in threading.enumerate()}
    agree(world, ok and "mpitrain-progress" in names and ended)


def test_a_progress_thread_has_a_device_before_it_enters_mpi(world, monkeypatch):
    """MPI's engine asks the driver for the device of the thread that enters.

    One that has none is the end of the process.
    """
    import threading

    import torch

    from mpitrain.comm import progress
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh

    done = []

    class WatchedComm(progress.MPI.Intracomm):
        def Iprobe(self, *arguments):
            done.append((threading.current_thread().name, "MPI"))
            return super().Iprobe(*arguments)

    start = progress.Progress.start_thread
    monkeypatch.setattr(
        progress.Progress, "start_thread", lambda self, comm, *first: start(self, WatchedComm(comm), *first)
    )
    way = dict(progress="thread", on_thread=lambda: done.append((threading.current_thread().name, "device")))
    mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=30, **way)
    before = list(done)
    for _ in range(50):
        all_reduce(torch.ones(200_000), mesh["dp"]).wait()
    mesh.free()
    ok = before == done[:1] == [("mpitrain-progress", "device")] and set(done[1:]) <= {
        ("mpitrain-progress", "MPI")
    }
    agree(world, ok, str(done[:3]))


def test_a_progress_thread_that_cannot_have_its_device_says_so(world):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    def fails():
        raise RuntimeError("invalid device ordinal")

    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        Mesh(world, Grid({"dp": world.size}), progress="thread", on_thread=fails)
