"""Little shared memory, as in a container.

What windows and buffers can come to is counted before; a page that isn't there is SIGBUS.
"""

import os
import sys

import numpy as np
import pytest
from conftest import LONG, agree
from launch import MPIRUN, environment, finished
from mounts import CONTAINER, may_mount

REDUCE = """
import sys
import numpy as np
from mpitrain.comm.base.world import finalize, start
start()
from mpi4py import MPI
from mpitrain.comm.collectives import all_reduce
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.mesh import Mesh

world = MPI.COMM_WORLD
mesh = Mesh(world, Grid({"tp": 2, "dp": world.size // 2}), timeout_s=60)
lent = mesh["dp"].allocate(int(sys.argv[1]) << 20).view(np.float32)
for axis, x in ((mesh["tp"], np.ones(4 << 20, np.float32)), (mesh["dp"], lent)):
    x[:] = 1
    all_reduce(x, axis).wait()
    assert (x == axis.size).all()
if world.rank == 0:
    windows = [name for name, axis in mesh.axes.items() if axis.window]
    refused = list(mesh.budget.refused)
    print("windows", windows, "lent", len(mesh["dp"]._allocations), "refused", refused, flush=True)
mesh.free()
finalize()
"""


def in_container(size, ranks, *command):
    """Run ranks that have `size` of shared memory; return what they say."""
    shell = f"{CONTAINER.format(size=size)} {MPIRUN} -n {ranks} " + " ".join(command)
    done = finished(
        ["unshare", "-m", "bash", "-c", shell], capture_output=True, text=True, env=environment(), timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@may_mount
@pytest.mark.parametrize(
    ("size", "ranks", "megabytes", "expected"),
    [
        ("1g", 4, 25, "windows ['tp', 'dp'] lent 1 refused []"),
        # each of two groups alone would fit
        ("200m", 4, 25, "windows ['tp', 'dp'] lent 0 refused ['dp']"),
        pytest.param("64m", 8, 1, "windows [] lent 0 refused ['tp', 'dp']", marks=LONG),
    ],
)
def test_no_more_is_taken_than_there_is(tmp_path, size, ranks, megabytes, expected):
    (tmp_path / "reduce.py").write_text(REDUCE)
    assert expected in in_container(size, ranks, sys.executable, str(tmp_path / "reduce.py"), str(megabytes))


@pytest.mark.mpi
@pytest.mark.parametrize("free", [float("inf"), 0], ids=["nobody says how much", "none"])
def test_axes_without_a_window_send_messages(world, monkeypatch, free):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.collectives import all_reduce
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.transports import messages, shared, window

    # one rank's view is all's
    monkeypatch.setattr(window, "free", lambda: free if world.rank == world.size - 1 else 1 << 40)
    mesh = Mesh(world, Grid({"dp": world.size}), transport="shared", timeout_s=60)
    axis = mesh["dp"]
    x = np.full(100_000, 1.0)
    lent = axis.allocate(1 << 20)
    all_reduce(x, axis).wait()
    windows = bool(free) and world.size > 1
    ok = (x == world.size).all() and not lent.any() and bool(axis.window) == bool(axis.views(lent)) == windows
    ok = ok and (axis.by_size(1 << 20) is (shared if windows else messages))
    shortage = mesh.budget.describe()
    ok = ok and (shortage == "" if windows or world.size == 1 else "for axes dp (2.1 MB a rank)" in shortage)
    mesh.free()
    agree(world, ok, f"window {axis.window}, told {shortage}")


@pytest.mark.mpi
def test_what_was_taken_is_not_there_again(world):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    mesh = Mesh(world, Grid({"dp": world.size}), transport="shared", timeout_s=60)
    axis = mesh["dp"]
    mesh.budget.left = 10_000
    found = [axis.views(axis.allocate(4096)) is not None for _ in range(3)]
    mesh.free()
    agree(world, found == [world.size > 1] * 2 + [False], f"shared: {found}")


@pytest.mark.mpi
@pytest.mark.parametrize("of", ["the budget", "pages"])
def test_ranks_agree_where_one_of_them_has_too_little(world, monkeypatch, of):
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh
    from mpitrain.comm.transports import window

    if world.size == 1:
        pytest.skip("alone, nothing is shared")
    mesh = Mesh(world, Grid({"dp": world.size}), transport="shared", timeout_s=60)
    axis = mesh["dp"]
    last = world.rank == world.size - 1
    if of == "pages":
        clear = window.Allocation.clear
        monkeypatch.setattr(window.Allocation, "clear", lambda self: clear(self) and not last)
    elif last:
        mesh.budget.left = 4095
    lent = axis.allocate(4096)
    ok = axis.views(lent) is None and len(lent) == 4096 and not lent.any()
    mesh.free()
    agree(world, ok, of)


@may_mount
def test_a_page_that_is_not_there_is_no_signal(tmp_path):
    """The kernel says that it can't write there. As in Allocation.clear, on a file that nobody has filled."""
    program = (
        "import mmap, sys; from mpitrain.comm.transports import window; a = "
        "window.Allocation.__new__(window.Allocation); import numpy as np;"
    )
    program += (
        "f = open('/dev/shm/f', 'w+b'); f.truncate(1 << 25); a.memory = np.frombuffer(mmap.mmap(f.fileno(), "
        "1 << 25), np.uint8);"
    )
    program += "print(a.clear()); a.memory = a.memory[: 1 << 16]; print(a.clear())"
    shell = f'{CONTAINER.format(size="1m")} {sys.executable} -c "$0"'
    done = finished(
        ["unshare", "-m", "bash", "-c", shell, program],
        capture_output=True,
        text=True,
        env=os.environ,
        timeout=60,
    )
    assert done.stdout.split() == ["False", "True"], done
