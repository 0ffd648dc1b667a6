"""Bandwidth of the collectives against what else is there: MPI's own calls, gloo, and memcpy.

    mpirun -n 2 python benchmarks/collectives.py [--sizes 65536,1048576,16777216,67108864]
        [--repeats 15]

Each number is GB/s of buffer (bytes of the full fp32 buffer / median seconds); the candidates take
turns within one run, so that a noisy machine is noisy for all of them. Prints a Markdown table.
memcpy copies the full buffer, on all ranks at once.
"""

import argparse
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpitrain.comm.base.grid import Grid, split
from mpitrain.comm.collectives import all_gather, all_reduce, reduce_scatter
from mpitrain.comm.mesh import Mesh

TRANSPORTS = ("messages", "collectives", "shared")
# own: `shared`, in buffers that the axis allocated, as gradient buckets are
OURS = (*TRANSPORTS, "own")


def candidates(
    world: MPI.Intracomm, meshes: dict[str, Mesh], num_bytes: int, gloo: bool
) -> dict[tuple[str, str], object]:
    """Return {(operation, who): function} on buffers of this size."""
    length = num_bytes // 4
    x = torch.ones(length)
    out = torch.empty(length)
    allocated = [
        torch.from_numpy(meshes["shared"]["dp"].allocate(num_bytes)).view(torch.float32) for _ in range(2)
    ]
    begin, end = split(length, world.size)[world.rank : world.rank + 2]
    shard = torch.empty(end - begin)
    array = x.numpy()
    array_out = out.numpy()
    array_shard = shard.numpy()
    found = {("copy", "memcpy"): lambda: out.copy_(x)}
    for name, mesh, (x_, out_) in [(name, mesh, (x, out)) for name, mesh in meshes.items()] + [
        ("own", meshes["shared"], allocated)
    ]:
        axis = mesh["dp"]
        found["reduce_scatter", name] = lambda axis=axis, x=x_: reduce_scatter(x, axis, shard).wait()
        found["all_gather", name] = lambda axis=axis, out=out_: all_gather(shard, axis, out).wait()
        found["all_reduce", name] = lambda axis=axis, out=out_: all_reduce(out, axis).wait()
    found["reduce_scatter", "native"] = lambda: world.Reduce_scatter_block(array, array_shard)
    found["all_gather", "native"] = lambda: world.Allgather(array_shard, array_out)
    found["all_reduce", "native"] = lambda: world.Allreduce(MPI.IN_PLACE, array_out)
    if gloo:
        found["reduce_scatter", "gloo"] = lambda: dist.reduce_scatter_tensor(shard, x)
        found["all_gather", "gloo"] = lambda: dist.all_gather_into_tensor(out, shard)
        found["all_reduce", "gloo"] = lambda: dist.all_reduce(out)
    return found


def measure(world: MPI.Intracomm, functions: dict, repeats: int) -> dict[tuple[str, str], float]:
    """Return the median over rounds of the slowest rank's seconds, the candidates taking turns in
    every round.
    """
    times: dict = {key: [] for key in functions}
    for _ in range(repeats + 2):
        for key, function in functions.items():
            world.Barrier()
            begin = time.perf_counter()
            function()
            times[key].append(world.allreduce(time.perf_counter() - begin, MPI.MAX))
    return {key: statistics.median(values[2:]) for key, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="65536,1048576,16777216,67108864")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = MPI.COMM_WORLD
    meshes = {name: Mesh(world, Grid({"dp": world.size}), transport=name) for name in TRANSPORTS}
    store = world.bcast(tempfile.mktemp())
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=world.rank, world_size=world.size)
    if world.rank == 0:
        print(
            f"{MPI.get_vendor()[0]} {'.'.join(map(str, MPI.get_vendor()[1]))}, {world.size} ranks, GB/s of "
            "buffer, fp32"
        )
        print("| operation | bytes | " + " | ".join((*OURS, "native", "gloo", "memcpy")) + " |")
        print("|---|---|" + "---|" * (len(OURS) + 3))
    for num_bytes in map(int, arguments.sizes.split(",")):
        seconds = measure(world, candidates(world, meshes, num_bytes, True), arguments.repeats)
        speed = {key: num_bytes / value / 1e9 for key, value in seconds.items()}
        for operation in ("reduce_scatter", "all_gather", "all_reduce"):
            row = [f"{speed[operation, who]:.2f}" for who in (*OURS, "native", "gloo")]
            if world.rank == 0:
                print(
                    f"| {operation} | {num_bytes} | {' | '.join(row)} | {speed['copy', 'memcpy']:.2f} |",
                    flush=True,
                )
    dist.destroy_process_group()
    for mesh in meshes.values():
        mesh.free()


if __name__ == "__main__":
    main()
