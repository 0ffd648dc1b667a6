"""Device buffers: straight to MPI where it is CUDA-aware, through pinned host memory where not. The same bits as host buffers."""

import pytest
from conftest import agree

pytestmark = [pytest.mark.mpi, pytest.mark.gpu]


@pytest.fixture
def mesh(world):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    from mpitrain.comm.grid import Grid
    from mpitrain.comm.mesh import Mesh

    torch.cuda.set_device(world.rank % torch.cuda.device_count())
    mesh = Mesh(world, Grid({"dp": world.size}), {"dp": range(world.size), "links": range(world.size)}, timeout_s=60)
    yield mesh
    mesh.free()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64"])
@pytest.mark.parametrize("length", [1, 4099, 3_000_001])
def test_collectives_of_device_buffers_equal_those_of_host_buffers(mesh, dtype, length):
    import torch

    from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter

    axis = mesh["dp"]
    host = (torch.randn(length, generator=torch.Generator().manual_seed(axis.rank)) * 9).to(getattr(torch, dtype))
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
    right, left = (mesh.rank + 1) % mesh.size, (mesh.rank - 1) % mesh.size
    sent = links.send("F", right, 1, torch.full((100_000,), float(mesh.rank), device="cuda"), right)
    found = links.receive("F", mesh.rank, 1, torch.empty(100_000, device="cuda"), left).wait()
    sent.wait()
    agree(mesh["links"].comm, (found == left).all().item())
