"""One process, or all ranks of a job: who does which part of the work on a checkpoint."""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from mpitrain.cluster.launch import is_single
from mpitrain.errors import InputError, storage_fault

LIMIT_S = 3600.0  # for which a rank may do nothing while the others wait for it
T = TypeVar("T")


class Team(Protocol):
    """What comm.world.World is too. Calls are collective."""

    rank: int
    size: int

    def all_gather(self, what: str, mine: Any) -> list:
        """Return what each rank gives."""

    def on_every_rank(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on each; an error of one is raised on all, an OSError as StorageError."""

    def on_first_rank(self, what: str, action: Callable[[], T]) -> T:
        """Run an action on the first; return its result on all; errors as in on_every_rank()."""


class TeamOfOne:
    """A team of one; MPI isn't started for it."""

    rank, size = 0, 1

    def all_gather(self, what: str, mine: Any) -> list:
        return [mine]

    def on_every_rank(self, what: str, action: Callable[[], T]) -> T:
        try:
            return action()
        except OSError as error:
            raise storage_fault(error) from error

    on_first_rank = on_every_rank


def together(body: Callable[[Team], int], report: Callable[[InputError], None]) -> int:
    """Run body(team) on the launcher's ranks, or alone; return the exit code.
    report: shows an error of all, once.
    """
    if is_single():
        return body(TeamOfOne())
    from mpitrain.cluster.guard import Guard, guarded
    from mpitrain.cluster.status_board import BUSY

    def on_ranks(guard: Guard) -> int:
        world = guard.connect()
        guard.place.name(f"rank {world.rank} of {world.size}", LIMIT_S)
        guard.place.enter("start", "at work on checkpoints", BUSY)
        return body(world)

    return guarded(on_ranks, report)
