"""Where a rank meets MPI: the world, whether it is the one the launcher meant, agreement on errors, and the way out."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from mpitrain.errors import InputError, MeshError

LAUNCHERS = {"OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun", "PMI_SIZE": "a PMI launcher (MPICH's mpirun, srun)"}


def connect() -> MPI.Intracomm:
    """Return the world of this job. Raises MeshError if the launcher started more ranks than this MPI sees.

    A launcher of another MPI starts N processes of which each believes to be rank 0 of 1, without a word.
    """
    world, said = MPI.COMM_WORLD, {name: int(os.environ[name]) for name in LAUNCHERS if os.environ.get(name, "").isdigit()}
    if not said and os.environ.get("SLURM_NTASKS", "").isdigit():
        said["SLURM_NTASKS"] = int(os.environ["SLURM_NTASKS"])
    for name, size in said.items():
        if size != world.size:
            library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip().rstrip("\0")
            raise MeshError(
                f"{LAUNCHERS.get(name, 'Slurm')} started {size} ranks ({name}), but {library} sees {world.size}: launcher and MPI library "
                "don't belong together; use the mpirun of this MPI, or srun --mpi with the PMI it was built for"
            )
    return world


def on_first_rank(world: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """Run `action` on rank 0 and return its result on all ranks; an InputError there is raised on all. Collective over `world`."""
    result = error = None
    if world.rank == 0:
        try:
            result = action()
        except InputError as found:
            error = found
    result, error = world.bcast((result, error))
    if error is not None:
        raise error
    return result


def on_every_rank(world: MPI.Intracomm, action: Callable[[], Any]) -> Any:
    """Run `action` on each rank and return its result there; the first rank's InputError is raised on all. Collective over `world`."""
    result = error = None
    try:
        result = action()
    except InputError as found:
        error = found
    found = next((error for error in world.allgather(error) if error is not None), None)
    if found is not None:
        raise found
    return result


def require_same(world: MPI.Intracomm, digest: str, what: str) -> None:
    """Raise MeshError on all ranks unless `digest` is the same everywhere. Collective over `world`."""
    digests = world.allgather(digest)
    different = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if different:
        raise MeshError(f"{what} differs on ranks {different[:8]} from rank 0; start every rank with the same files and options")


def node_rank(world: MPI.Intracomm) -> int:
    """Return the number of this rank among the ranks of its node. Collective over `world`."""
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    rank = node.rank
    node.Free()
    return rank


def num_nodes(world: MPI.Intracomm) -> int:
    """Return the number of nodes: of groups of ranks that share memory. Collective over `world`."""
    return world.allreduce(int(node_rank(world) == 0))


def abort(code: int = 1) -> None:
    """End the whole job at once: the other ranks may be waiting for this one for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    time.sleep(0.5)  # launchers drop what they have not yet forwarded when a job is aborted: the reason would be lost
    MPI.COMM_WORLD.Abort(code)
