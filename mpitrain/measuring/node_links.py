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
from mpitrain.training.machine.device_placement import DevicePlacement

# numbers of fp32, whose time is that of their bytes; on a CPU as many as a bucket has: a cache holds them
LONG = {"cuda": 1 << 24, "cpu": 1 << 21}
SHORT = 1 << 8  # the time is that of the hops
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
    return {"inside": list(mine), "between": between, "pair": pair}


def measured(world: World, placement: DevicePlacement, way: Way) -> Iterator[Samples]:
    """Yield bytes/s of each kind of link while all ranks send, and the seconds of a hop. Collective."""
    axes = axes_of(world)
    mesh = Mesh(world.comm, Grid({"dp": world.size}), axes, timeout_s=TIMEOUT_S, way=way)
    for name, ranks in axes.items():
        if len(ranks) > 1:
            yield Samples(f"links.{name}", _bandwidths(mesh[name], placement.device))
            yield Samples(f"links.{name}_latency_s", _latencies(mesh[name], placement.device))
    mesh.free()


def _bandwidths(axis: Axis, device: torch.device) -> list[float]:
    """Return bytes/s of one rank in one direction, in a ring."""
    length = LONG[device.type]
    crossing = length * 4 * (axis.size - 1) / axis.size
    return [crossing / seconds for seconds in _seconds(axis, device, length)]


def _latencies(axis: Axis, device: torch.device) -> list[float]:
    """Return the seconds of one of the hops of a ring."""
    return [seconds / (axis.size - 1) for seconds in _seconds(axis, device, SHORT * axis.size)]


def _seconds(axis: Axis, device: torch.device, length: int) -> list[float]:
    """Return how long half of an all-reduce takes, the mean of both halves."""
    length -= length % axis.size
    whole = torch.ones(length, device=device)
    times = []
    for _ in range(REPEATS_OF_LINKS + 1):
        barrier(axis).wait()
        begin = time.perf_counter()
        shard = reduce_scatter(whole, axis).wait()
        all_gather(shard, axis, whole).wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append((time.perf_counter() - begin) / 2)
        whole.fill_(1.0)
    return times[1:]
