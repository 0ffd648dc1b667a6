"""Where a rank meets MPI: the world, whether it is the one the launcher meant, agreement on errors, and the way in and out."""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from mpi4py import MPI

from mpitrain.comm import library
from mpitrain.errors import InputError, MeshError

Communicator = MPI.Intracomm  # for annotations elsewhere: only comm/ calls it
STARTING = "in MPI_Init"  # what `ps` calls a rank there
NAP_S = 0.1  # between two looks whether rank 0 is done with something long
BEAT_S = 1.0  # between two signs of life of a rank that others wait for
FORWARD_S = 0.5  # launchers drop what they have not yet forwarded when a job is aborted: the reason would be lost
ABORT_S = 3.0  # MPI_Abort can hang, or return


class Owed(NamedTuple):
    """What others have to do so that a wait ends: an instruction, and where it stands in their program; -1: that isn't known."""

    instruction: str
    position: int = -1


class Place(Protocol):
    """What is told that a rank waits, and for what; cluster/board.py has it."""

    phase: str
    what: str

    def waiting(self, what: str) -> AbstractContextManager[None]: ...

    def waits_for(self, what: str, owing: Sequence[int], owed: Owed) -> None: ...

    def waits_no_more(self) -> None: ...


class Nowhere:
    """A place that nobody reads."""

    phase, what = "start", ""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def waits_for(self, what: str, owing: Sequence[int], owed: Owed) -> None:
        pass

    def waits_no_more(self) -> None:
        pass


NOWHERE = Nowhere()


class World:
    """All ranks of this job, and those of this node. Every call is collective over all ranks; meanwhile `place` says what it is for."""

    def __init__(self, comm: MPI.Intracomm, place: Place):
        self.comm, self.place, self.rank, self.size = comm, place, comm.rank, comm.size
        with place.waiting("finding the ranks of this node"):
            self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
            self.num_nodes = comm.allreduce(int(self.node.rank == 0))
            self.node_ranks = self._ranks_of_each_node()
        self._beaten = 0.0

    def _ranks_of_each_node(self) -> int:
        """Return how many ranks a node has, if all have as many and those of one are neighbours; else 0."""
        first, size = self.node.bcast(self.rank), self.comm.allreduce(self.node.size, MPI.MAX)
        in_place = self.node.size == size and first % size == 0 and self.rank == first + self.node.rank
        return size if self.comm.allreduce(in_place, MPI.LAND) else 0

    def on_first_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 and return its result on all ranks; an InputError there is raised on all.

        An action that may take long calls beat().
        """
        result = error = None
        if self.rank == 0:
            try:
                result = action()
            except InputError as found:
                error = found
        with self.place.waiting(f"for rank 0: {what}"):
            over, result, error = self.comm.bcast((True, result, error))
        while not over:
            with self.place.waiting(f"for rank 0: {what}"):
                over, result, error = self.comm.bcast(None)
        if error is not None:
            raise _of_all(error)
        return result

    def from_first_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0 and return its result on all ranks. An error there is that rank's alone, and the end of the job."""
        result = action() if self.rank == 0 else None
        with self.place.waiting(f"for rank 0: {what}"):
            return self.comm.bcast(result)

    def on_first_of_node(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on the first rank of each node and return its result on all ranks of the node. An error there ends the job."""
        result = action() if self.node.rank == 0 else None
        with self.place.waiting(f"for the first rank of this node: {what}"):
            return self.node.bcast(result)

    def of_node(self, what: str, mine: Any) -> list:
        """Return what each rank of this node gives, in their order."""
        with self.place.waiting(f"for the ranks of this node: {what}"):
            return self.node.allgather(mine)

    def beat(self) -> None:
        """Tell the others, within on_first_rank(), that rank 0 still works."""
        if time.monotonic() - self._beaten > BEAT_S:
            self.comm.bcast((False, None, None))
            self._beaten = time.monotonic()

    def on_every_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on each rank and return its result there; the first rank's InputError is raised on all, with its rank."""
        result = error = None
        try:
            result = action()
        except InputError as found:
            error = found
        errors = self.all_gather(what, error)
        failed = [rank for rank, found in enumerate(errors) if found is not None]
        if failed:
            alone = f" (on {self._names(failed)} only, in phase {self.place.phase}; all need the same files and environment)"
            alone = alone if len(failed) < self.size else ""
            raise _of_all(type(errors[failed[0]])(f"{errors[failed[0]].args[0]}{alone}"))
        return result

    def require_same(self, what: Mapping[str, str]) -> None:
        """Raise MeshError on all ranks, with the name of what differs, unless the values are the same everywhere."""
        every = self.all_gather("comparing configuration and code", dict(what))
        for name, wanted in every[0].items():
            different = [rank for rank, found in enumerate(every) if found.get(name) != wanted]
            if different:
                found = every[different[0]].get(name, "none")
                raise _of_all(
                    MeshError(f"{name}: found {found} on {self._names(different)}, {wanted} on rank 0; start every rank with the same one")
                )

    def all_gather(self, what: str, mine: Any) -> list:
        """Return what each rank gives."""
        with self.place.waiting(f"for all ranks: {what}"):
            return self.comm.allgather(mine)

    def all_to_all(self, what: str, mine: list) -> list:
        """Give each rank its item of `mine`, and return what every rank has for this one."""
        with self.place.waiting(f"for all ranks: {what}"):
            return self.comm.alltoall(mine)

    def gather(self, what: str, mine: Any) -> list | None:
        """Return what each rank gives on rank 0, and None on the others."""
        with self.place.waiting(f"for all ranks: {what}"):
            return self.comm.gather(mine)

    def scatter(self, what: str, parts: Callable[[], list]) -> Any:
        """Give each rank its part of what `parts` returns on rank 0. An error there is that rank's alone, and the end of the job.

        The others sleep meanwhile: hundreds that poll would leave rank 0 no core.
        """
        found = parts() if self.rank == 0 else None
        with self.place.waiting(f"for rank 0: {what}"):
            ready = self.comm.Ibarrier()
            while not ready.Test():
                time.sleep(NAP_S)
            return self.comm.scatter(found)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        with self.place.waiting(f"for all ranks: {what}"):
            self.comm.Barrier()

    def _names(self, ranks: list[int]) -> str:
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{more}"


def _of_all(error: InputError) -> InputError:
    error.everywhere = True
    return error


def connect(place: Place) -> World:
    """Start MPI and return the world of this job. Raises MeshError if the launcher started another number of ranks.

    A launcher of another MPI starts N processes of which each believes to be rank 0 of 1, without a word.
    """
    with place.waiting("for all ranks to call MPI_Init"), _called(STARTING):
        start()
    world = MPI.COMM_WORLD
    name, size = library.contradiction(world.size)
    if name:
        found = library.name().split(",")[0].strip()
        raise _of_all(
            MeshError(
                f"{library.LAUNCHERS.get(name, 'Slurm')} started {size} ranks ({name}), but {found} sees {world.size}: launcher and "
                "MPI library don't belong together; use the mpirun of this MPI, or srun --mpi with the PMI it was built for"
            )
        )
    return World(world, place)


def alone() -> Communicator:
    """Return the communicator of this rank alone; it stays MPI's."""
    return MPI.COMM_SELF


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Give this process another name meanwhile, which the ranks of its node can see when they have no other way to know."""
    path, before = Path("/proc/self/comm"), None
    with suppress(OSError):  # no Linux, or a container that keeps it from changing: then only a report says less
        before = path.read_text()
        path.write_text(name)
    yield
    with suppress(OSError):
        if before is not None:
            path.write_text(before)


def start() -> None:
    """Call MPI_Init_thread, unless that was done. By ctypes: mpi4py holds Python's lock meanwhile, and no limit could be watched."""
    if MPI.Is_initialized():
        return
    provided = ctypes.c_int()
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # as mpi4py does when it initialises MPI itself: errors become exceptions


def finalize() -> None:
    """Call MPI_Finalize, if MPI was started. Collective over all ranks. By ctypes, as in start()."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        ctypes.CDLL(MPI.__file__).MPI_Finalize()


def flush() -> None:
    """Write what this rank has said. It waits no longer than launchers need to forward that: a pipe may be full, and nobody reads it."""
    writing = threading.Thread(target=_flush, daemon=True)
    writing.start()
    writing.join(FORWARD_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()


def abort(code: int) -> None:
    """End the whole job at once with an exit code; doesn't return. The other ranks may be waiting for this one for ever."""
    flush()
    time.sleep(FORWARD_S)
    threading.Timer(ABORT_S, os._exit, [code]).start()
    if not MPI.Is_initialized() and any(name in os.environ for name in library.SIZES):
        start()  # where the others wait: MPICH's launcher doesn't mind a rank that ends before
    if MPI.Is_initialized() and not MPI.Is_finalized():
        handle = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
        comm = handle.from_address(MPI._addressof(MPI.COMM_WORLD))
        ctypes.CDLL(MPI.__file__).MPI_Abort(comm, code)  # as in start(), or the timer would wait for the lock
    os._exit(code)
