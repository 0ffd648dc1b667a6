"""Where a rank meets MPI: the world, if it is the launcher's, agreement on errors, in and out."""

import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from mpitrain.comm.base import cores, launchers, library
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.mpi_errors import error_of_operation
from mpitrain.comm.base.shared_work import BEAT_S, Work, Worker, WorkManager
from mpitrain.errors import InputError, LibraryError, MeshError, StoppedEarly, on_all_ranks, storage_fault

if TYPE_CHECKING:
    # for annotations elsewhere: only comm/ calls it
    from mpi4py.MPI import Intracomm as Communicator
else:
    Communicator = object

STARTING = "mpitrain:init"  # what `ps` calls a rank inside MPI_Init
NAP_S = 0.1  # between two looks whether rank 0 is done with something long
# what rank 0 tells the others within on_first_rank()
AT_WORK = "at work"
SHARED = "shared"
OVER = "over"
# launchers drop what they have not yet forwarded when a job is aborted: the reason would be lost
FORWARD_S = 0.5
ABORT_S = 3.0  # MPI_Abort can hang, or return


class ExpectedAction(NamedTuple):
    """What others have to do so that a wait ends.
    instruction: and its position in their program; -1: that isn't known.
    """

    instruction: str
    position: int = -1


class StatusReporter(Protocol):
    """Notes that a rank waits, and for what; cluster/status_board.py has it."""

    phase: str
    what: str

    def waiting(self, what: str) -> AbstractContextManager[None]: ...

    def waits_for(self, what: str, waiting_on: Sequence[int], expected: ExpectedAction) -> None: ...

    def waits_no_more(self) -> None: ...


class NullReporter:
    """A status reporter that discards."""

    phase, what = "start", ""

    def waiting(self, what: str) -> AbstractContextManager[None]:
        return nullcontext()

    def waits_for(self, what: str, waiting_on: Sequence[int], expected: ExpectedAction) -> None:
        pass

    def waits_no_more(self) -> None:
        pass


NULL_REPORTER = NullReporter()


class World:
    """All ranks of this job, and those of this node.

    Every call is collective over all ranks; meanwhile `place` says what it is for.
    node_cores: that the ranks of this node may use, together.
    in_flight: messages under way when a rank died: MPI may still write into their buffers.
    is_asked: returns whether this rank was asked to leave; beat() tells rank 0 of the others.
    """

    def __init__(
        self, comm: Communicator, place: StatusReporter, is_asked: Callable[[], bool] = lambda: False
    ):
        self.comm = comm
        self.place = place
        self.rank = comm.rank
        self.size = comm.size
        self._is_asked = is_asked
        with place.waiting("finding the ranks of this node"):
            self.node = comm.Split_type(MPI.COMM_TYPE_SHARED)
            self.num_nodes = comm.allreduce(int(self.node.rank == 0))
            self.node_ranks = self._ranks_of_each_node()
            self.node_cores = cores.num_of_node(self.node)
        self.in_flight: object = None
        self._beaten = 0.0
        self._help: Work = _no_help
        self._manager: WorkManager | None = None

    def _ranks_of_each_node(self) -> int:
        """Return how many ranks a node has, if all have as many and those of one are neighbours; else 0."""
        first = self.node.bcast(self.rank)
        size = self.comm.allreduce(self.node.size, MPI.MAX)
        in_place = self.node.size == size and first % size == 0 and self.rank == first + self.node.rank
        return size if self.comm.allreduce(in_place, MPI.LAND) else 0

    def on_first_rank(self, what: str, action: Callable[[], Any], help: Work | None = None) -> Any:
        """Run `action` on rank 0 and return its result on all ranks.

        An InputError or StoppedEarly there is raised on all; an OSError as a StorageError.
        An action that may take long calls beat(), or share().
        help: yields the parts of what a rank makes of an item of share().
        """
        self._help = help or _no_help
        result = error = None
        if self.rank == 0:
            try:
                result = action()
            except (InputError, StoppedEarly) as found:
                error = found
            except OSError as found:
                error = storage_fault(found)
            self._end_sharing()
        with self._waiting(f"for rank 0: {what}"):
            state, result, error = self.comm.bcast((OVER, result, error))
        while state != OVER:
            if state == SHARED:
                Worker(self.comm, self._help, self._is_asked).run(
                    lambda: self._waiting(f"for rank 0: {what}")
                )
            with self._waiting(f"for rank 0: {what}"):
                if state == AT_WORK:
                    self.comm.allreduce(self._is_asked(), MPI.LOR)
                state, result, error = self.comm.bcast(None)
        if error is not None:
            raise on_all_ranks(error)
        return result

    def share(self, items: Iterable[Any], ranks: Sequence[int], first: Any) -> Iterator[list[Any]]:
        """Yield the parts that `help` makes of each item, on one of `ranks`, in the order of the items.

        Rank 0 calls it within on_first_rank(), and reads ahead. first: what each of the other ranks
        is given before its first item; nothing is yielded for it. Raises an item's InputError in
        its place.
        """
        self.comm.bcast((SHARED, None, None))
        self._manager = WorkManager(self.comm, ranks, first, self._help, self._waiting)
        yield from self._manager.results(items)
        self._end_sharing()

    def _end_sharing(self) -> None:
        manager, self._manager = self._manager, None
        if manager:
            manager.end()

    def on_first_ranks(self, size: int, what: str, action: Callable[["World"], Any]) -> Any:
        """Have the first `size` ranks run action(their world); return rank 0's result on all ranks.

        An InputError or StoppedEarly, alike on all that run it, is raised on all. The others sleep:
        ranks that poll would take cores from those that work.
        """
        with self._waiting(f"for all ranks: {what}"):
            comm = self.comm.Split(0 if self.rank < size else MPI.UNDEFINED, self.rank)
        result = error = None
        if self.rank < size:
            part = World(cast("Communicator", comm), self.place)
            try:
                result = action(part)
            except (InputError, StoppedEarly) as found:
                error = found
            part.node.Free()
            comm.Free()
        with self._waiting(f"for the first ranks: {what}"):
            self._sleep_until_all_are_here()

        def outcome() -> Any:
            if error is not None:
                raise error
            return result

        return self.on_first_rank(what, outcome)

    def from_first_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on rank 0; return its result on all ranks. An error there ends the job."""
        result = action() if self.rank == 0 else None
        with self._waiting(f"for rank 0: {what}"):
            return self.comm.bcast(result)

    def on_first_of_node(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on each node's first rank; return its result there. An error ends all."""
        result = action() if self.node.rank == 0 else None
        with self._waiting(f"for the first rank of this node: {what}"):
            return self.node.bcast(result)

    def node_gather(self, what: str, mine: Any) -> list[Any]:
        """Return what each rank of this node gives, in their order."""
        with self._waiting(f"for the ranks of this node: {what}"):
            return self.node.allgather(mine)

    def beat(self) -> bool:
        """Tell the others, within on_first_rank(), that rank 0 still works.

        Return whether one was asked to leave; seen once a second.
        """
        if self._manager:
            return self._manager.still_works()
        if time.monotonic() - self._beaten <= BEAT_S:
            return False
        self.comm.bcast((AT_WORK, None, None))
        asked: bool = self.comm.allreduce(self._is_asked(), MPI.LOR)
        self._beaten = time.monotonic()
        return asked

    def first_of(self, what: str, mine: str) -> str:
        """Return the text of the first rank that gives one; "" if none does."""
        return next(filter(None, self.all_gather(what, mine)), "")

    def on_every_rank(self, what: str, action: Callable[[], Any]) -> Any:
        """Run `action` on each rank and return its result there.

        The first rank's InputError is raised on all, with its rank; an OSError as a StorageError.
        """
        result = error = None
        try:
            result = action()
        except InputError as found:
            error = found
        except OSError as found:
            error = storage_fault(found)
        errors = self.all_gather(what, error)
        failed = [rank for rank, found in enumerate(errors) if found is not None]
        if failed:
            alone = (
                f" (on {self._names(failed)} only, in phase {self.place.phase}; all need the same files and "
                "environment)"
            )
            alone = alone if len(failed) < self.size else ""
            raise on_all_ranks(type(errors[failed[0]])(f"{errors[failed[0]].args[0]}{alone}"))
        return result

    def require_same(self, what: Mapping[str, str]) -> None:
        """Raise MeshError on all ranks, naming what differs, unless all values are the same."""
        every = self.all_gather("comparing configuration and code", dict(what))
        for name, wanted in every[0].items():
            different = [rank for rank, values in enumerate(every) if values.get(name) != wanted]
            if different:
                values = every[different[0]].get(name, "none")
                raise on_all_ranks(
                    MeshError(
                        f"{name}: found {values} on {self._names(different)}, {wanted} on rank 0; start "
                        "every rank with the same one"
                    )
                )

    def all_gather(self, what: str, mine: Any) -> list[Any]:
        """Return what each rank gives."""
        with self._waiting(f"for all ranks: {what}"):
            return self.comm.allgather(mine)

    def all_to_all(self, what: str, mine: list[Any]) -> list[Any]:
        """Give each rank its item of `mine`, and return what every rank has for this one."""
        with self._waiting(f"for all ranks: {what}"):
            return self.comm.alltoall(mine)

    def gather(self, what: str, mine: Any) -> list[Any] | None:
        """Return what each rank gives on rank 0, and None on the others."""
        with self._waiting(f"for all ranks: {what}"):
            return self.comm.gather(mine)

    def scatter(self, what: str, parts: Callable[[], list[Any]]) -> Any:
        """Give each rank its part of what `parts` returns on rank 0. An error there ends the job.

        The others sleep meanwhile: hundreds that poll would leave rank 0 no core.
        """
        pieces = parts() if self.rank == 0 else None
        with self._waiting(f"for rank 0: {what}"):
            self._sleep_until_all_are_here()
            return self.comm.scatter(pieces)

    def _sleep_until_all_are_here(self) -> None:
        ready = self.comm.Ibarrier()
        while not ready.Test():
            time.sleep(NAP_S)

    def barrier(self, what: str) -> None:
        """Wait for all ranks."""
        with self._waiting(f"for all ranks: {what}"):
            self.comm.Barrier()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Note what this rank waits for in the block; MPI's errors become a DeliveryError."""
        try:
            with self.place.waiting(what):
                yield
        except MPI.Exception as error:
            raise error_of_operation(what, error) from error

    def _names(self, ranks: list[int]) -> str:
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:4]))}{more}"


def _no_help(item: Any) -> Any:
    raise TypeError("share() needs an on_first_rank() with help")


def connect(
    place: StatusReporter,
    is_asked: Callable[[], bool] = lambda: False,
    may_be_alone: bool = False,
    revocable: bool = False,
) -> World:
    """Start MPI and return the world of this job.

    Raises MeshError if the launcher started another number of ranks: one of another MPI starts N
    processes of which each believes to be rank 0 of 1.
    is_asked: see World.
    may_be_alone: a process that no launcher started may be alone wherever it runs, also where it
    could be one of several copies.
    revocable: its communicator, and what is made of it, can be revoked together.
    """
    started = launchers.launch()
    left = launchers.inherited()
    copies = launchers.torchrun()
    unset = " ".join(f"-u {name}" for name in left.launcher.variables if name in os.environ) if left else ""
    with place.waiting("for all ranks to call MPI_Init"), _called(STARTING):
        start()
    world = MPI.COMM_WORLD
    if revocable:
        from mpitrain.comm.base.revocable import RevocableComm

        world = RevocableComm.first(world)
    name, size = library.contradiction(world.size, started)
    if world.size == 1 and not may_be_alone:
        _require_no_copy(left, unset, copies)
    if name:
        found = library.name().split(",")[0].strip()
        launcher = next(
            launcher_kind.name for launcher_kind in launchers.LAUNCHERS if name in launcher_kind.sizes
        )
        raise on_all_ranks(
            MeshError(
                f"{launcher} started {size} ranks ({name}), but {found} sees {world.size}: launcher and MPI "
                "library don't match; use the mpirun of this MPI, or srun --mpi with the PMI it "
                "was built for"
            )
        )
    return World(world, place, is_asked)


def _require_no_copy(left: launchers.Launch | None, unset: str, copies: tuple[int, int] | None) -> None:
    """Raise MeshError where this process, which is alone, probably should be a rank of a job."""
    if copies and copies[1] > 1:
        raise on_all_ranks(
            MeshError(
                f"torchrun started {copies[1]} copies ({launchers.TORCHRUN}), which MPI doesn't connect: "
                f"each would train the whole model alone; start ranks with mpirun -n {copies[1]} mpitrain "
                "run ..., or srun"
            )
        )
    if left and left.size > 1:
        raise on_all_ranks(
            MeshError(
                f"{left.name} started {left.size} ranks ({left.variable}), and this process has their "
                "variables, but is none of them: a rank, or a shell that was one, started it; let mpirun "
                f"start mpitrain, or for one rank type: env {unset} mpitrain ..."
            )
        )


def alone() -> Communicator:
    """Return the communicator of this rank alone; it stays MPI's."""
    return MPI.COMM_SELF


@contextmanager
def _called(name: str) -> Iterator[None]:
    """Give this process another name meanwhile, which other ranks of its node can see.

    One word: Slurm's proctrack/linuxproc and proctrack/pgid take /proc/PID/stat apart at white
    space, and neither signal nor kill a process whose name has a space or a line break.
    """
    path = Path("/proc/self/comm")
    before = None
    # no Linux, or a container that keeps it from changing: then only a report says less
    with suppress(OSError):
        before = path.read_text().removesuffix("\n")
        path.write_text(name)
    yield
    with suppress(OSError):
        if before is not None:
            path.write_text(before)


def start() -> None:
    """Call MPI_Init_thread, unless that was done.

    By ctypes: mpi4py holds Python's lock meanwhile, and no limit could be watched. Where this
    process has the variables of a rank, and is none, they are removed: MPI would look for a server
    that isn't there. Where a container forbids processes to read each other's memory, MPICH is set
    not to: its first large message would fail.
    """
    if is_finalized():
        raise LibraryError(
            "MPI was finalised in this process before, and starts only once; leave that to mpitrain"
        )
    if MPI.Is_initialized():
        return
    if launchers.inherited() is not None:
        for name in os.environ.keys() - launchers.without_rank(os.environ).keys():
            del os.environ[name]
    if not library.may_read_others():
        os.environ.setdefault(library.READS_OTHERS, "0")
    provided = ctypes.c_int()
    ctypes.CDLL(MPI.__file__).MPI_Init_thread(None, None, MPI.THREAD_MULTIPLE, ctypes.byref(provided))
    for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
        # as mpi4py does when it initialises MPI itself: errors become exceptions
        comm.Set_errhandler(MPI.ERRORS_RETURN)


def is_finalized() -> bool:
    return bool(MPI.Is_finalized())


def finalize() -> None:
    """Call MPI_Finalize, if MPI was started. Collective over all ranks. By ctypes, as in start()."""
    if MPI.Is_initialized() and not MPI.Is_finalized():
        ctypes.CDLL(MPI.__file__).MPI_Finalize()


def flush() -> None:
    """Write what this rank has said, as long as launchers need: nobody may read a full pipe."""
    writing = threading.Thread(target=_flush, daemon=True)
    try:
        writing.start()
    except (RuntimeError, MemoryError):  # of threads there can be no more
        if all(_takes_some(number) for number in (1, 2)):
            _flush()
        return
    writing.join(FORWARD_S)


def _takes_some(number: int) -> bool:
    """Return whether a write to a descriptor doesn't wait for a reader."""
    poll = select.poll()
    poll.register(number, select.POLLOUT)
    return bool(poll.poll(0))


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):  # closed, or nobody reads it
            stream.flush()


def _exit_in(seconds: float, code: int) -> None:
    """Have this process end after a while: with a code, by SIGALRM where no thread starts."""
    try:
        threading.Timer(seconds, os._exit, [code]).start()
    except (RuntimeError, MemoryError):
        signal.setitimer(signal.ITIMER_REAL, seconds)


def abort(code: int) -> None:
    """End the whole job at once with an exit code, as others may wait; doesn't return."""
    flush()
    time.sleep(FORWARD_S)
    _exit_in(ABORT_S, code)
    with suppress(MeshError):  # without a library there is no more to do
        _abort(code)
    os._exit(code)


def _others_wait_for_ever() -> bool:
    """Return whether the other ranks, in MPI_Init, don't end with this one.

    Open MPI's launcher ends all with the first that fails; there this rank may be in MPI_Init, too,
    and a second call would be an error of its own. MPICH's launcher doesn't mind.
    """
    started = launchers.launch()
    return started is not None and started.name != launchers.OPEN_MPI


def _abort(code: int) -> None:
    if not MPI.Is_initialized() and _others_wait_for_ever():
        start()
    if MPI.Is_initialized() and not MPI.Is_finalized():
        handle = ctypes.c_int if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int) else ctypes.c_void_p
        comm = handle.from_address(MPI._addressof(MPI.COMM_WORLD))
        # as in start(), or the timer would wait for the lock
        ctypes.CDLL(MPI.__file__).MPI_Abort(comm, code)
