"""Device buffers: straight to MPI where it takes them, and through pinned host memory.

The same bits as host buffers.
"""

import os

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.gpu, pytest.mark.few_ranks]


@pytest.fixture(params=["auto", "staged"])
def mesh(world, request):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.comm.mesh import Mesh
    from mpitrain.training.machine import device_placement, gpus

    ranks = World(world, NULL_REPORTER)
    mine = device_placement.take_turns(gpus.torch_gpus(), ranks)
    mine.use()
    way = device_placement.way_of_messages(mine, ranks, request.param, timeout_s=240)
    axes = {"dp": range(world.size), "links": range(world.size)}
    mesh = Mesh(
        world, Grid({"dp": world.size}), axes, timeout_s=60, progress="thread", on_thread=mine.use, way=way
    )
    yield mesh
    mesh.free()
    ranks.node.Free()


def test_a_child_process_tries_what_this_mpi_says(mesh, world):
    """Where it says yes, the child comes back with all bytes; where it says no, it is the child that dies."""
    import torch

    from mpitrain.comm.device import gpu_probe, gpu_support

    if "UNREAL_GPU_GB" in os.environ:
        pytest.skip("tests/hardware/without_gpu has its memory on the host, where any MPI takes it")
    vendor = "rocm" if torch.version.hip else "cuda"
    said = gpu_support.verdict(gpu_support.what_it_says(vendor))
    failed = (
        gpu_probe.attempt("mpitrain.training.machine.gpus:buffers", str(torch.cuda.current_device()))
        if world.rank == 0
        else None
    )
    agree(
        world,
        world.rank or said is None or said == (not failed),
        f"it says {said}, the child {failed or 'came back'}",
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("length", [1, 4099, 3_000_001])
def test_collectives_of_device_buffers_equal_those_of_host_buffers(mesh, dtype, length):
    import torch

    from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter

    axis = mesh["dp"]
    host = (torch.randn(length, generator=torch.Generator().manual_seed(axis.rank)) * 9).to(
        getattr(torch, dtype)
    )
    device = host.cuda()
    shard = reduce_scatter(device, axis).wait()
    ok = torch.equal(shard.cpu(), reduce_scatter(host, axis).wait())
    gathered = all_gather(shard, axis, torch.empty_like(device)).wait()
    all_reduce(host, axis).wait()
    all_reduce(device, axis).wait()
    ok = ok and torch.equal(device.cpu(), host) and torch.equal(gathered.cpu(), host)
    agree(axis.comm, ok, f"{dtype} {length}")


def test_a_buffer_still_being_written_is_sent_when_it_is_done(mesh):
    import torch

    from mpitrain.comm.collectives import all_reduce

    a = torch.ones(6000, 6000, device="cuda")
    for _ in range(20):
        a = a @ a * 1e-4
    x = torch.full((1 << 20,), 1.0, device="cuda") * (a[0, 0] * 0 + 2)
    all_reduce(x, mesh["dp"]).wait()
    agree(mesh["dp"].comm, (x == 2 * mesh.size).all().item())


def test_links_carry_device_tensors(mesh):
    import torch

    from mpitrain.comm.links import Links

    links = Links(mesh["links"], mesh.size, 2)
    right = (mesh.rank + 1) % mesh.size
    left = (mesh.rank - 1) % mesh.size
    sent = links.send("F", right, 1, torch.full((100_000,), float(mesh.rank), device="cuda"), right)
    found = links.receive("F", mesh.rank, 1, torch.empty(100_000, device="cuda"), left).wait()
    sent.wait()
    agree(mesh["links"].comm, (found == left).all().item())
