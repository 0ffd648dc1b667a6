"""The environment of a job: what a user wants to know before blaming the trainer."""

import importlib
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpitrain.cluster import shared_memory
from mpitrain.cluster.crowding import SMALLER, crowded
from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base import launchers, library
from mpitrain.comm.base.cores import cores_of_process
from mpitrain.comm.base.world import World
from mpitrain.comm.device import gpu_support
from mpitrain.errors import LibraryError, counted, library_fault

if TYPE_CHECKING:
    from mpitrain.comm.mesh import Mesh
    from mpitrain.training.machine.gpus import Gpus

TIMEOUT_S = 60.0  # of one message
REDUCED_BYTES = 16 << 20
REPEATS = 7
Line = tuple[str, str]  # name, finding

MANY = {  # hundreds of ranks on one host, for a dry run
    "MPICH": "of more than 256 ranks on one host MPICH's mpirun hangs: name it as several nodes, "
    "for 512 ranks mpirun -launcher fork "
    "-hosts n0:64,n1:64,n2:64,n3:64,n4:64,n5:64,n6:64,n7:64 -n 512, with " + SMALLER["MPICH"]
}


class Environment(NamedTuple):
    """lines: (name, finding). fault: why there is no torch, or None."""

    lines: list[Line]
    fault: LibraryError | None


def environment(world: World, place: RankStatus) -> Environment:
    """Return what this process was started in. Collective over all ranks."""
    from mpitrain.comm.base.grid import Grid
    from mpitrain.comm.mesh import Mesh

    gpus, fault = _devices(world)
    with place.waiting("measuring the bandwidth"):
        mesh = Mesh(world.comm, Grid({"dp": world.size}), {"world": range(world.size)}, timeout_s=TIMEOUT_S)
        hosts = Counter(world.all_gather("their nodes", library.host()))
        bandwidth = _bandwidth(mesh)
    lines = [*_facts(world, mesh, hosts, bandwidth), *gpus]
    mesh.free()
    return Environment(lines, fault)


def without_mpi() -> Iterator[Line]:
    """Yield what can be known of this node alone."""
    yield "MPI", "can't be loaded, see below"
    started = launchers.launch()
    yield "launcher", _launcher(started.name if started else None)
    yield "cores", str(len(cores_of_process()))
    yield "shared memory", shared_memory.describe()
    try:
        from mpitrain.training.machine import gpus
    except ImportError as error:
        yield "torch", f"can't be loaded: {error}"
        return
    devices = gpus.torch_gpus()
    yield from _torch(devices)
    yield "GPUs", ", ".join(map(str, devices.seen)) or "none"


def _torch(devices: "Gpus") -> list[Line]:
    from mpitrain.kernels import processor
    from mpitrain.training.machine import gpus

    return [
        ("torch", gpus.build()),
        ("CPU products", processor.in_words()),
        ("GPU driver", devices.driver or "none"),
    ]


def _facts(world: World, mesh: "Mesh", hosts: Counter, bandwidth: str) -> Iterator[Line]:
    yield "MPI", library.versions()
    yield "library", f"{library.name()}, {library.loaded()._name}"
    yield "launcher", _launcher(library.launcher())
    level = library.threads()
    yield "thread level", level + " (multiple is needed for a progress thread)" * (level != "multiple")
    places = ", ".join(f"{host} {count}" for host, count in hosts.items())
    yield "ranks", f"{mesh.size} on {counted(world.num_nodes, 'nodes')}: {places}"
    cores = len(cores_of_process())
    hint = crowded(library.vendor(), world.node.size, world.node_cores)
    yield "cores", "; ".join(filter(None, [f"{cores} for rank 0", hint]))
    if many := launcher_options(library.vendor(), world.node.size, world.node_cores):
        yield "many ranks", many
    yield "shared memory", shared_memory.describe()
    if not library.may_read_others():
        yield "in a node", "large messages are copied twice: process_vm_readv (CMA) is forbidden here"
    yield "largest tag", str(mesh["world"].num_tags)
    yield "bandwidth", bandwidth


def _devices(world: World) -> tuple[list[Line], LibraryError | None]:
    """Return lines on GPUs and the way of messages, and why there is no torch. Collective."""
    try:
        world.on_every_rank("loading torch", _load_torch)
    except LibraryError as fault:
        return [("torch", "can't be loaded, see below")], fault
    return _gpus(world), None


def _load_torch() -> None:
    try:
        importlib.import_module("mpitrain.training.machine.device_placement")
    except ImportError as error:
        raise library_fault(error) or error from None


def _gpus(world: World) -> list[Line]:
    from mpitrain.training.machine import device_placement, gpus

    devices = gpus.torch_gpus()
    kinds = set(world.all_gather("their devices", devices.vendor))
    lines = _torch(devices)
    if None in kinds or len(kinds) > 1:
        makers = sorted(f"{gpus.VENDORS[kind]}'s" if kind else "none" for kind in kinds)
        without = "on no rank" if kinds == {None} else f"not the same on all ranks: {', '.join(makers)}"
        aware = [(f"MPI, {vendor}", _awareness(vendor)) for vendor in gpus.VENDORS]
        return [*lines, ("GPUs", without), *aware]
    mine = device_placement.take_turns(devices, world)
    mine.use()
    used = Counter(world.all_gather("their GPUs", mine.gpu.name if mine.first else None))
    cards = ", ".join(f"{count} x {name}" for name, count in used.items() if name)
    lines.append(("GPUs", f"{cards}; rank 0 has {mine.gpu}"))
    lines.append(("shared", device_placement.shared(mine, world) or "none: each rank has its own"))
    lines.append((f"MPI, {devices.vendor}", _awareness(devices.vendor)))
    return [*lines, ("messages", str(device_placement.way_of_messages(mine, world, "auto", TIMEOUT_S)))]


def _awareness(vendor: str) -> str:
    said = gpu_support.what_it_says(vendor)
    answer = {
        True: "takes device buffers",
        False: "takes no device buffers",
        None: "doesn't say whether it takes device buffers",
    }
    return f"{answer[gpu_support.verdict(said)]}: {gpu_support.in_words(said)}"


def _launcher(name: str | None) -> str:
    return f"{name or 'none, a single process'}; mpirun on the path: {shutil.which('mpirun') or 'none'}"


def launcher_options(vendor: str, ranks: int, cores: int) -> str:
    """Return how to start hundreds of ranks on a host, if there are more ranks than cores."""
    return MANY.get(vendor, "") if ranks > cores else ""


def _bandwidth(mesh: "Mesh") -> str:
    """Time an all-reduce over all ranks."""
    if mesh.size == 1:
        return "needs 2 ranks: mpirun -n 2 mpitrain doctor"
    from mpitrain.comm.collectives import all_reduce, barrier

    x = np.zeros(REDUCED_BYTES // 4, np.float32)
    times = []
    for _ in range(REPEATS):
        barrier(mesh["world"]).wait()
        begin = time.perf_counter()
        all_reduce(x, mesh["world"]).wait()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    speed = f"{seconds * 1e3:.1f} ms, {REDUCED_BYTES / seconds / 1e9:.2f} GB/s of buffer"
    return f"all-reduce of {REDUCED_BYTES >> 20} MiB fp32 over {mesh.size} ranks: {speed}"
