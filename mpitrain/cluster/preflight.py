"""The conditions that a job starts under, as one table (run.preflight).

What is wrong for certain is refused before (prepare.py: worlds that differ, configurations, code
and libraries) or here: a file system that doesn't hold one checkpoint. What only looks wrong is
marked with `!`, and the node named.

    auto  ranks, code, space, clocks, devices: what one message between all ranks tells; printed on
          several nodes, and where something is marked
    full  and the bandwidth of each axis, for 1 MiB to the next rank of the axis, from host memory;
          always printed
"""

import shutil
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mpitrain.cluster import code_identity
from mpitrain.cluster.limit import Limit
from mpitrain.comm.axis import Axis
from mpitrain.comm.base import library
from mpitrain.comm.base.world import World
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import CheckpointError, counted
from mpitrain.inputs import listed
from mpitrain.plan.declared.optimizers import GROUPS, num_moments
from mpitrain.plan.plan import Plan

SKEW_S = 1.0  # clocks that differ by more make logs unreadable, and times of files wrong
SLOW = 0.5  # of the median of an axis
ROUNDS = 3
NUM_BYTES = 1 << 20
REPEATS = 4  # the best counts: what else the machine does is not of interest here
SHORT, LONG = 1 << 18, 1 << 22  # bytes of messages that show how much a link carries
LONG_ENOUGH_S = 0.1  # of a short one


class Finding(NamedTuple):
    """A line of the table."""

    name: str
    found: str
    fine: bool = True


class MeasuredLink(NamedTuple):
    """From the rank before this one on an axis to this one. nodes: of both."""

    ranks: tuple[int, int]
    nodes: tuple[str, str]
    bytes_per_s: float


def describe(world: World, plan: Plan, folder: Path, device: str, *, measure: bool) -> str:
    """Return the table of look(); "" on one node with nothing marked or measured. Collective."""
    begin = time.perf_counter()
    findings = look(world, plan, folder, device, measure=measure)
    is_shown = measure or world.num_nodes > 1 or not all(finding.fine for finding in findings)
    return table(findings, time.perf_counter() - begin) if is_shown else ""


def look(world: World, plan: Plan, folder: Path, device: str, *, measure: bool) -> list[Finding]:
    """Return what there is to say, on all ranks. Collective over `world`.

    device: what this rank computes on.  measure: the bandwidth, too.
    Raises CheckpointError, alike on all ranks, if `folder` can't hold a checkpoint.
    """
    findings = [
        _ranks(world),
        *world.on_first_rank("looking for space", lambda: (_code(), _space(plan, folder))),
    ]
    facts = world.all_gather("their nodes, clocks and devices", (library.host(), _stamps(world), device))
    hosts = [host for host, _, _ in facts]
    findings += [
        _clocks(hosts, [stamps for _, stamps, _ in facts]),
        _devices(hosts, [device for _, _, device in facts]),
    ]
    if measure:
        links_of_axes = _measured(world, plan, hosts)
        findings += [bandwidth(name, links) for name, links in links_of_axes.items()]
    return findings


def table(findings: Sequence[Finding], seconds: float) -> str:
    """Return the findings as text, with how long it took to make them."""
    names = [finding.name + " !" * (not finding.fine) for finding in findings]
    width = max(map(len, names)) + 2
    return f"preflight, in {seconds:.2f} s:\n" + "\n".join(
        f"  {name:{width}}{finding.found}" for name, finding in zip(names, findings)
    )


# ---------------------------------------------------------------- what one rank knows


def _ranks(world: World) -> Finding:
    launcher = library.launcher()  # a world of another size was refused
    how = f"as {launcher} started" if launcher else "without a launcher"
    return Finding("ranks", f"{world.size} on {counted(world.num_nodes, 'nodes')}, {how}")


def _code() -> Finding:
    identity = code_identity.code()
    versions = ", ".join(
        f"{name.removeprefix('the version of ')} {value}"
        for name, value in identity.items()
        if "version" in name
    )
    return Finding("code", f"the same on all ranks: mpitrain {identity['the code of mpitrain']}, {versions}")


def _space(plan: Plan, folder: Path) -> Finding:
    """Compare what is free with weights and moments. Raises CheckpointError if they don't fit."""
    moments = max(num_moments(plan.config.optimizer, group) for group in GROUPS)
    itemsize = 8 if plan.config.precision.compute == "fp64" else 4
    needed = (1 + moments) * sum(spec.numel for spec in plan.parameters()) * itemsize
    total, _, free = shutil.disk_usage(folder)
    if not total:
        return Finding("space", f"{folder} doesn't say how much is free")
    text = f"{free / 1e9:.1f} GB free, a checkpoint takes up to {needed / 1e9:.2g} GB"
    if free < needed:
        raise CheckpointError(f"run.dir = {folder}: {text}; free some space, or choose another run.dir")
    # the last one, the next, and one more
    return Finding("space", f"{folder}: {text}", fine=free > 3 * needed)


# ---------------------------------------------------------------- what all ranks know together


def _stamps(world: World) -> list[float]:
    """Return this rank's times of day at moments that all ranks share: barriers. Collective."""
    stamps = []
    for _ in range(ROUNDS):
        world.barrier("comparing clocks")
        stamps.append(time.time())
    return stamps


def _clocks(hosts: Sequence[str], stamps: Sequence[Sequence[float]]) -> Finding:
    """Compare clocks with rank 0's, by a node's least difference: ranks leave a barrier late."""
    apart = defaultdict[str, list[float]](list)
    for host, mine in zip(hosts, stamps):
        apart[host] += [here - first for here, first in zip(mine, stamps[0])]
    least = {host: min(differences, key=abs) for host, differences in apart.items()}
    worst = max(least, key=lambda host: abs(least[host]))
    off = [f"{host} by {seconds:+.1f} s" for host, seconds in least.items() if abs(seconds) > SKEW_S]
    text = f"within {abs(least[worst]):.3f} s of rank 0's"
    return Finding("clocks", f"{listed(off)} off rank 0's: synchronise them" if off else text, fine=not off)


def _devices(hosts: Sequence[str], devices: Sequence[str]) -> Finding:
    """Count devices; those that are fewer than others are named with their nodes."""
    counts = Counter(devices)
    (most, _), *others = counts.most_common()
    text = ", ".join(f"{count} x {device}" for device, count in counts.items())
    if not others:
        return Finding("devices", text)
    nodes = dict.fromkeys(host for host, device in zip(hosts, devices) if device != most)
    return Finding("devices", f"{text}; not {most} on {listed(nodes)}", fine=False)


def slowest_links(world: World, plan: Plan, names: Sequence[str]) -> dict[str, float]:
    """Return what the slowest link of each of these axes carries, in bytes/s, while all send. Collective.

    The middle of three messages: a shaped link lets the first through. Short ones if they last.
    """
    mesh, own = _mesh(world, plan, names)
    slowest = {}
    for name in own:
        for num_bytes in (SHORT, LONG):
            mine = min(
                statistics.median(_seconds(world, mesh[name], turn, num_bytes) for _ in range(3))
                for turn in range(2)
            )
            times = world.all_gather(f"the slowest link of axis {name}", mine)
            worst = max(took for took in times if took < float("inf"))
            slowest[name] = num_bytes / worst
            if worst > LONG_ENOUGH_S:
                break
    mesh.free()
    return slowest


def _mesh(world: World, plan: Plan, names: Sequence[str] = ()) -> tuple[Mesh, dict[str, Sequence[int]]]:
    """Return the axes (of `names`, or all) that carry something, and their ranks. Collective."""
    axes = plan.axes
    keys = plan.config.comm
    own = {
        name: axes.of(world.rank)[name]
        for name, carried in axes.carried.items()
        if carried.operations and (not names or name in names)
    }
    with world.place.waiting("for all ranks: axes to measure"):
        limits = {"timeout_s": Limit(keys.timeout_s).seconds, "place": world.place}
        return Mesh(world.comm, axes.grid, own, transport=keys.transport, **limits), own


def _measured(world: World, plan: Plan, hosts: Sequence[str]) -> dict[str, list[MeasuredLink]]:
    """Measure the links of every axis that carries something, in turn. Collective."""
    mesh, own = _mesh(world, plan)
    speeds = {}
    for name, ranks in own.items():
        axis = mesh[name]
        before = ranks[axis.rank - 1]
        best = min(_seconds(world, axis, turn) for turn in range(2) for _ in range(REPEATS))
        mine = MeasuredLink((before, world.rank), (hosts[before], hosts[world.rank]), NUM_BYTES / best)
        links = [link for link in world.all_gather(f"the bandwidth of axis {name}", mine) if link.bytes_per_s]
        if links:
            speeds[name] = links
    mesh.free()
    return speeds


def _seconds(world: World, axis: Axis, turn: int, num_bytes: int = NUM_BYTES) -> float:
    """Return how long a message from the rank before took, infinity if there was none. Collective.

    In a turn every second rank sends: no rank has two links, which would hold up each other.
    """
    x = np.zeros(num_bytes, np.uint8)
    links = Links(axis, 1, 1)
    to = receiver(axis.rank, axis.size, turn)
    source = (axis.rank - 1) % axis.size
    world.barrier(f"measuring axis {axis.name}")
    begin = time.perf_counter()
    if to is not None:
        links.send("F", 0, 0, x, to).wait()
    if receiver(source, axis.size, turn) is None:
        return float("inf")
    links.receive("F", 0, 0, x, source).wait()
    return time.perf_counter() - begin


def receiver(rank: int, size: int, turn: int) -> int | None:
    """Return whom `rank` of an axis sends to in turn 0 or 1; None: nobody, as an odd last one."""
    if rank % 2 != turn or (rank + 1 == size and size % 2):
        return None
    return (rank + 1) % size


def bandwidth(axis: str, links: Sequence[MeasuredLink]) -> Finding:
    """Return the median of the links of an axis, and the nodes all of whose links are far below it.

    A node is as fast as its fastest link: a slow one may be its neighbour's. With two, nobody can tell.
    """
    median = statistics.median(link.bytes_per_s for link in links)
    best = defaultdict[str, float](float)
    for link in links:
        for node in link.nodes:
            best[node] = max(best[node], link.bytes_per_s)
    slow = [f"{node} {speed / 1e9:.2g}" for node, speed in best.items() if speed < SLOW * median]
    worst = min(links, key=lambda link: link.bytes_per_s)
    text = (
        f"median {median / 1e9:.2g} GB/s, lowest {worst.bytes_per_s / 1e9:.2g} from rank "
        f"{worst.ranks[0]} to {worst.ranks[1]}"
    )
    return Finding(f"axis {axis}", text + (f"; slow: {listed(slow)} GB/s" if slow else ""), fine=not slow)
