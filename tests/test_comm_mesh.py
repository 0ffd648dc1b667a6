"""The communicators of a layout: who shares an axis, in which order, and that nothing is left behind."""

import pytest
from conftest import agree

pytestmark = pytest.mark.mpi


def test_every_axis_has_its_ranks_in_order(world):
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    degrees = {1: (1, 1), 2: (2, 1), 4: (2, 2), 8: (2, 4)}.get(world.size, (world.size, 1))
    dense = Grid({"tp": degrees[0], "cp": 1, "dp": 1, "pp": degrees[1]})
    expert = Grid({"etp": 1, "ep": degrees[0], "edp": 1, "pp": degrees[1]})
    mesh = Mesh(world, dense, expert=expert, spans={"data": ("cp", "dp"), "model": ("tp", "pp")})
    wrong = []
    for name, axis in mesh.axes.items():
        ranks = axis.comm.allgather(world.rank)
        if name in dense.degrees:
            wrong += [] if tuple(ranks) == dense.group(world.rank, name) and axis.rank == dense.coordinates(world.rank)[name] else [name]
        if name in ("ep", "etp", "edp"):
            wrong += [] if tuple(ranks) == expert.group(world.rank, name) else [name]
        wrong += [] if axis.comm.Get_name() == f"mpitrain.{name}" else [f"name of {name}"]
    wrong += [] if mesh["data"].size == 1 and mesh["model"].size == world.size == mesh["world"].size else ["spans"]
    mesh.free()
    agree(world, not wrong, f"wrong: {wrong}")


def test_groups_given_as_lists_leave_the_others_alone(world):
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    ends = (0, world.size - 1) if world.size > 1 else (0,)
    mesh = Mesh(world, Grid({"pp": world.size}), groups={"tied": [ends]})
    expected = len(ends) if world.rank in ends else 1
    found = mesh["tied"].size
    mesh.free()
    agree(world, found == expected, f"size {found}, expected {expected}")


def test_a_layout_of_another_size_is_refused(world):
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh
    from mpitrain.errors import MeshError

    try:
        Mesh(world, Grid({"dp": world.size + 1}))
        text = ""
    except MeshError as error:
        text = str(error)
    agree(world, f"mpirun started {world.size}" in text, text)


def test_communicators_are_freed(world):
    """Far more meshes than an MPI has room for communicators."""
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    for _ in range(150):
        Mesh(world, Grid({"tp": 1, "cp": 1, "dp": world.size, "pp": 1}), transport="messages").free()
    agree(world, True)


def test_a_result_of_more_than_one_gibibyte_arrives_whole(world, monkeypatch):
    """Messages are cut at a limit, here lowered: the pieces have to arrive in order and without gaps."""
    import torch

    from mpitrain.comm import messages
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    monkeypatch.setattr(messages, "LIMIT", 1000)
    mesh = Mesh(world, Grid({"dp": world.size}), transport="messages", timeout_s=30)
    x = torch.arange(12_345, dtype=torch.float64)
    all_reduce(x, mesh["dp"]).wait()
    ok = torch.equal(x, torch.arange(12_345, dtype=torch.float64) * world.size)
    mesh.free()
    agree(world, ok)


def test_a_progress_thread_changes_nothing_but_who_enters_mpi(world):
    import threading

    import torch

    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.grid import Grid
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
