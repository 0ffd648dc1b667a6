"""`mpitrain doctor`: what a user wants to know before blaming the trainer."""

import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable

import mpi4py
import numpy as np
from mpi4py import MPI

from mpitrain.cluster.guard import Guard
from mpitrain.comm.collectives import all_reduce, barrier
from mpitrain.comm.grid import Grid
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.world import connect
from mpitrain.errors import DONE

TIMEOUT_S = 60.0  # of one message

LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}
LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun", "SLURM_STEP_ID": "srun", "PMI_SIZE": "a PMI launcher (MPICH's mpirun)"}
HINTS = {
    "MPICH": ("MPIR_CVAR_POLLS_BEFORE_YIELD", "MPIR_CVAR_POLLS_BEFORE_YIELD=1 MPIR_CVAR_CH4_PROGRESS_THROTTLE=true"),
    "Open MPI": ("OMPI_MCA_mpi_yield_when_idle", "OMPI_MCA_mpi_yield_when_idle=true"),
}


def main(guard: Guard, say: Callable[[str], None]) -> int:
    """Report on the world this process was started in. Collective over all ranks."""
    world = connect(guard.place)
    guard.join(world)
    with guard.place.waiting("measuring the bandwidth"):
        mesh = Mesh(world.comm, Grid({"dp": world.size}), timeout_s=TIMEOUT_S)
        hosts = Counter(world.comm.allgather(MPI.Get_processor_name()))
        bandwidth = _bandwidth(mesh)
    if world.rank == 0:
        for name, value in _facts(mesh, hosts, bandwidth):
            say(f"{name:14}{value}")
    mesh.free()
    return DONE


def _facts(mesh: Mesh, hosts: Counter, bandwidth: str):
    """Yield (name, finding) lines."""
    vendor, version = MPI.get_vendor()
    yield "MPI", f"{vendor} {'.'.join(map(str, version))}, standard {MPI.VERSION}.{MPI.SUBVERSION}, mpi4py {mpi4py.__version__}"
    yield "library", MPI.Get_library_version().split("\n")[0].rstrip("\0")
    yield "launcher", _launcher()
    level = MPI.Query_thread()
    yield "thread level", LEVELS[level] + ("" if level == MPI.THREAD_MULTIPLE else " (multiple is needed for a progress thread)")
    yield "CUDA-aware", f"{'yes' if mesh.device_aware else 'no'}: {mesh.device_reason}"
    yield "ranks", f"{mesh.size} on {mesh.num_nodes} nodes: " + ", ".join(f"{host} {count}" for host, count in hosts.items())
    cores = len(os.sched_getaffinity(0))
    yield "cores", f"{cores} for rank 0" + _crowded(vendor, mesh["node"].size, cores)
    yield "largest tag", str(mesh["world"].num_tags)
    yield "bandwidth", bandwidth


def _launcher() -> str:
    found = next((what for name, what in LAUNCHERS.items() if name in os.environ), "none, a single process")
    return f"{found}; mpirun on the path: {shutil.which('mpirun') or 'none'}"


def _crowded(vendor: str, ranks: int, cores: int) -> str:
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
