"""`mpitrain doctor`: what a user wants to know before blaming the trainer."""

import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable

import numpy as np

from mpitrain.cluster import shared_memory
from mpitrain.cluster.guard import Guard
from mpitrain.comm import awareness, library
from mpitrain.comm.collectives import all_reduce, barrier
from mpitrain.comm.grid import Grid
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import World, connect
from mpitrain.errors import DONE

TIMEOUT_S = 60.0  # of one message

HINTS = {
    "MPICH": ("MPIR_CVAR_POLLS_BEFORE_YIELD", "MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE=true"),
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_mpi_yield_when_idle=true"),
}
MANY = {  # hundreds of ranks on one machine, for a dry run
    "MPICH": "of more than 256 ranks on one machine MPICH's mpirun hangs: name it as several nodes, for 512 ranks mpirun -launcher fork "
    "-hosts n0:64,n1:64,n2:64,n3:64,n4:64,n5:64,n6:64,n7:64 -n 512, with MPIR_CVAR_CH4_NETMOD=ofi MPIR_CVAR_CH4_ROOTS_ONLY_PMI=1",
}


def main(guard: Guard, say: Callable[[str], None]) -> int:
    """Report on the world this process was started in. Collective over all ranks."""
    world = connect(guard.place)
    guard.join(world)
    gpus = _devices(world)
    with guard.place.waiting("measuring the bandwidth"):
        mesh = Mesh(world.comm, Grid({"dp": world.size}), {"world": range(world.size)}, timeout_s=TIMEOUT_S)
        hosts = Counter(world.all_gather("their nodes", library.host()))
        bandwidth = _bandwidth(mesh)
    if world.rank == 0:
        for name, value in (*_facts(world, mesh, hosts, bandwidth), *gpus):
            say(f"{name:14}{value}")
    mesh.free()
    return DONE


def _facts(world: World, mesh: Mesh, hosts: Counter, bandwidth: str):
    """Yield (name, finding) lines."""
    yield "MPI", library.versions()
    yield "library", f"{library.name()}, {library.loaded()._name}"
    yield "launcher", _launcher()
    level = library.threads()
    yield "thread level", level + ("" if level == "multiple" else " (multiple is needed for a progress thread)")
    yield "ranks", f"{mesh.size} on {world.num_nodes} nodes: " + ", ".join(f"{host} {count}" for host, count in hosts.items())
    cores = len(os.sched_getaffinity(0))
    yield "cores", f"{cores} for rank 0" + crowded(library.vendor(), world.node.size)
    if many := launcher_options(library.vendor(), world.node.size, cores):
        yield "many ranks", many
    yield "shared memory", shared_memory.told()
    yield "largest tag", str(mesh["world"].num_tags)
    yield "bandwidth", bandwidth


def _devices(world: World) -> list[tuple[str, str]]:
    """Return (name, finding) of GPUs: which there are, who shares them, the way of messages. Collective over all ranks."""
    try:
        from mpitrain.parallel import processor
        from mpitrain.training.machine import device, gpus
    except ImportError as error:  # the rest is worth telling, too
        return [("torch", f"can't be loaded: {error}")]
    found = gpus.of_torch()
    kinds = set(world.all_gather("their devices", found.vendor))
    lines = [("torch", gpus.build()), ("CPU products", processor.in_words()), ("GPU driver", found.driver or "none")]
    if None in kinds or len(kinds) > 1:
        without = "on no rank" if kinds == {None} else f"not the same on all ranks: {', '.join(sorted(map(_maker, kinds)))}"
        return [*lines, ("GPUs", without), *((f"MPI, {vendor}", _awareness(vendor)) for vendor in gpus.VENDORS)]
    mine = device.take_turns(found, world)
    mine.use()
    used = Counter(world.all_gather("their GPUs", mine.gpu.name if mine.first else None))
    lines.append(("GPUs", ", ".join(f"{count} x {name}" for name, count in used.items() if name) + f"; rank 0 has {mine.gpu}"))
    lines.append(("shared", device.shared(mine, world) or "none: each rank has one of its own"))
    lines.append((f"MPI, {found.vendor}", _awareness(found.vendor)))
    return [*lines, ("messages", str(device.way_of_messages(mine, world, "auto", TIMEOUT_S)))]


def _maker(vendor: str | None) -> str:
    from mpitrain.training.machine.gpus import VENDORS

    return f"{VENDORS[vendor]}'s" if vendor else "none"


def _awareness(vendor: str) -> str:
    said = awareness.what_it_says(vendor)
    answer = {True: "takes device buffers", False: "takes no device buffers", None: "doesn't say whether it takes device buffers"}
    return f"{answer[awareness.verdict(said)]}: {awareness.in_words(said)}"


def _launcher() -> str:
    return f"{library.launcher() or 'none, a single process'}; mpirun on the path: {shutil.which('mpirun') or 'none'}"


def launcher_options(vendor: str, ranks: int, cores: int) -> str:
    """Return how to start hundreds of ranks on one machine, where that needs telling and there are more ranks than cores."""
    return MANY.get(vendor, "") if ranks > cores else ""


def crowded(vendor: str, ranks: int) -> str:
    """Return what to set where a node has more ranks than cores, whichever of these rank 0 is bound to; nothing where it is set."""
    variable, setting = HINTS.get(vendor, ("", ""))
    if ranks <= (os.cpu_count() or 1) or not variable or variable in os.environ:
        return ""
    return f"; {ranks} ranks on {os.cpu_count()} cores: set {setting}, or waiting ranks keep the cores from working ones"


def _bandwidth(mesh: Mesh, num_bytes: int = 16 << 20, repeats: int = 7) -> str:
    """Time an all-reduce of 16 MiB over all ranks."""
    if mesh.size == 1:
        return "needs 2 ranks: mpirun -n 2 mpitrain doctor"
    x, times = np.zeros(num_bytes // 4, np.float32), []
    for _ in range(repeats):
        barrier(mesh["world"]).wait()
        begin = time.perf_counter()
        all_reduce(x, mesh["world"]).wait()
        times.append(time.perf_counter() - begin)
    seconds = statistics.median(times)
    speed = f"{seconds * 1e3:.1f} ms, {num_bytes / seconds / 1e9:.2f} GB/s of buffer"
    return f"all-reduce of {num_bytes >> 20} MiB fp32 over {mesh.size} ranks: {speed}"
