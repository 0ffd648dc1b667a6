"""What the ranks of a node, and the nodes, send each other a second, by the collectives that a run calls."""

import time
from collections.abc import Iterator

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.base.world import World
from mpitrain.comm.collectives import all_gather, barrier, reduce_scatter
from mpitrain.comm.device.gpu_support import Way
from mpitrain.comm.mesh import Mesh
from mpitrain.measuring.device import REPEATS_OF_LINKS, Samples
from mpitrain.plan.predict.step_time.machine import LINKS

# numbers of fp32, whose time is that of their bytes; on a CPU as many as a bucket has: a cache holds them
LONG = {"cuda": 1 << 24, "cpu": 1 << 21}
SHORT = 1 << 8  # the time is that of the hops
IN_A_ROW = 16  # short ones for one value: what wakes a rank late, or early, is in each alike
TIMEOUT_S = 120.0


def axes_of(world: World) -> dict[str, list[int]]:
    """Return the ranks of this node, its neighbour's and its own, and its own on all nodes. Collective.

    One alone where nodes have different numbers of ranks, or there is one; and where a node is one pair.
    """
    mine = world.node_gather("who is on this node", world.rank)
    nodes = sorted(set(map(tuple, world.all_gather("the ranks of their nodes", tuple(mine)))))
    alike = len({len(node) for node in nodes}) == 1
    between = [node[mine.index(world.rank)] for node in nodes] if alike else [world.rank]
    place = mine.index(world.rank) // 2 * 2
    pair = list(mine[place : place + 2]) if alike and len(mine) >= 4 and len(mine) % 2 == 0 else [world.rank]
    return dict(zip(LINKS, (list(mine), between, pair)))


def mesh_of(world: World, way: Way) -> Mesh:
    """Return communicators of each kind of link. Collective; the caller frees them."""
    return Mesh(world.comm, Grid({"dp": world.size}), axes_of(world), timeout_s=TIMEOUT_S, way=way)


def measured(mesh: Mesh, device: torch.device) -> Iterator[Samples]:
    """Yield bytes/s of each kind of link while all ranks send, and the seconds of a hop. Collective."""
    for name in LINKS:
        if mesh[name].size > 1:
            yield Samples(f"links.{name}", _bandwidths(mesh[name], device))
            yield Samples(f"links.{name}_latency_s", _latencies(mesh[name], device))


def _bandwidths(axis: Axis, device: torch.device) -> list[float]:
    """Return bytes/s of one rank in one direction, in a ring."""
    length = LONG[device.type]
    crossing = length * 4 * (axis.size - 1) / axis.size
    return [crossing / seconds for seconds in _seconds(axis, device, length, 1)]


def _latencies(axis: Axis, device: torch.device) -> list[float]:
    return [seconds / (axis.size - 1) for seconds in _seconds(axis, device, SHORT * axis.size, IN_A_ROW)]


def _seconds(axis: Axis, device: torch.device, length: int, in_a_row: int) -> list[float]:
    """Return how long half of an all-reduce takes, the mean of both halves of so many in a row."""
    length -= length % axis.size
    whole = torch.zeros(length, device=device)
    times = []
    for _ in range(REPEATS_OF_LINKS + 1):
        barrier(axis).wait()
        begin = time.perf_counter()
        for _ in range(in_a_row):
            shard = reduce_scatter(whole, axis).wait()
            all_gather(shard, axis, whole).wait()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / (2 * in_a_row))
    return times[1:]
