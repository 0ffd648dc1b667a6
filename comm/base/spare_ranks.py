"""Spare ranks take the places of ranks that die, where MPI survives a death (ULFM: Open MPI 5).

    all       the ranks that live; those beyond the layout are spares
    layout    the ranks that have a place in the layout, in its order: the world of a run

    a death   MPI raises an error on some ranks that wait for the dead one. Each of them revokes all its
              communicators, which raises one on the ranks that wait for it, and so on: nobody is
              left waiting. Ranks that compute find out at their next message
    the end   of a round: all agree whether it ended well
    repair    all shrink `all` to those that live, and spares get the places of the dead; where these
              are too few, there are fewer places, and ranks with the last ones move

Who has which place follows from the places before and from who lives, which MPI has all agree on:
no message tells it. A death during a repair is one of the next round.
"""

import os
import time
from typing import TYPE_CHECKING, cast

import numpy as np

from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.mpi_errors import tells_of_deaths
from mpitrain.errors import ConfigError, RankLostError

if TYPE_CHECKING:
    from mpitrain.comm.base.revocable import RevocableComm

SPARE = -1  # the place of a spare
NAP_S = 0.02  # between two looks of a spare, which leaves its core to others
END_TAG = 1
ENABLED = "OMPI_MCA_mpi_ft_enable"  # what mpirun --with-ft ulfm has ranks see


def survives_deaths() -> bool:
    """Return whether a job of this MPI lives when a rank has died."""
    return tells_of_deaths() and is_enabled()


def is_enabled() -> bool:
    """Return whether this job was started with fault tolerance, before MPI is."""
    return os.environ.get(ENABLED, "0").lower() in ("1", "true", "yes", "enabled")


def require_fault_tolerance(num_spares: int, num_ranks: int) -> None:
    """Raise ConfigError unless this MPI survives the death of a rank, and some ranks aren't spares.

    Open MPI built with ULFM also runs without it, and then ends when a rank dies.
    """
    key = f"recovery.spares = {num_spares}"
    if not tells_of_deaths():
        raise ConfigError(
            f"{key}: found {MPI.get_vendor()[0]}, which ends when a rank dies, needed an MPI with ULFM; use "
            "Open MPI 5, or leave recovery.spares out: mpitrain supervise restarts a run"
        )
    if not is_enabled():
        raise ConfigError(
            f"{key}: found Open MPI without fault tolerance; start it by mpirun --with-ft ulfm ..., or leave "
            "recovery.spares out"
        )
    if num_spares >= num_ranks:
        raise ConfigError(
            f"{key}: found {num_ranks} ranks, needed more than spares; start the ranks of the layout and "
            f"{num_spares} more"
        )


class SpareRanks:
    """All ranks that live, and their places. Construction is collective over `comm`.

    unit: how many places go together, where there can be fewer of them; 0: there can't.
    layout: of the ranks with a place, in a round; on a spare MPI's null communicator.
    """

    def __init__(self, comm: "RevocableComm", num_spares: int, unit: int = 0):
        self._all = comm
        comm.together.watch()
        self._num_places = comm.size - num_spares
        self._unit = unit
        self._places = [rank if rank < self._num_places else SPARE for rank in range(comm.size)]
        self._hosts: list[str] = comm.allgather(MPI.Get_processor_name())
        self._past = list[object]()  # of earlier rounds: MPI may still write there
        self.layout = cast("MPI.Intracomm", MPI.COMM_NULL)

    @property
    def place(self) -> int:
        """The place of this rank in the layout; SPARE for none."""
        return self._places[self._all.rank]

    @property
    def num_places(self) -> int:
        """The places of the layout."""
        return self._num_places

    @property
    def num_left(self) -> int:
        """The number of spares."""
        return self._places.count(SPARE)

    def make_layout(self) -> None:
        """Make the communicator of a round. Collective over all; raises MPI.Exception for a death."""
        is_spare = self.place == SPARE
        self.layout = self._all.Split(MPI.UNDEFINED if is_spare else 0, max(self.place, 0))

    def wait_for_end(self) -> int:
        """Wait, as a spare, until a round is over; return the exit code. Raises MPI.Exception for a death."""
        code = np.zeros(1, np.int64)
        request = self._all.Irecv(code, self._places.index(0), END_TAG)
        while not request.Test():
            time.sleep(NAP_S)
        return int(code[0])

    def tell_end(self, code: int) -> None:
        """Tell the spares that the round is over, from the first place. Raises MPI.Exception for a death."""
        spares = [rank for rank, place in enumerate(self._places) if place == SPARE]
        for rank in spares if self.place == 0 else ():
            self._all.Send(np.array([code], np.int64), rank, END_TAG)

    def is_broken(self) -> bool:
        """Return whether a rank has died, as far as this one knows."""
        return bool(self._all.Is_revoked() or self._all.Get_failed().size)

    def revoke(self) -> None:
        """Wake every rank that waits for this one, or for one that this one wakes."""
        self._all.together.revoke()

    def ended_well(self, here: bool) -> bool:
        """Agree whether a round ended well on all ranks. Collective over all ranks that live.

        For a death that one of them didn't know of MPI raises an error, alike on all. One that all
        knew of, as of a spare, ends no round.
        """
        try:
            self._all.Ack_failed()
            return bool(self._all.Agree(int(here)))
        except MPI.Exception:
            return False

    def repair(self, kept: object) -> list[int]:
        """Give the places of the dead to spares, and return them. Collective over all that live.

        A spare on the same node goes first. kept: what was under way.
        Raises RankLostError, alike on all, if spares are too few, and there can't be fewer places.
        """
        shrunk = self._shrunk()
        was, now = self._all.Get_group(), shrunk.Get_group()
        alive = now.Translate_ranks(None, was)
        host_of = {place: host for place, host in zip(self._places, self._hosts) if place != SPARE}
        places = [self._places[rank] for rank in alive]
        hosts = [self._hosts[rank] for rank in alive]
        lost = sorted({*range(self._num_places)} - {*places})
        left = len(places) - len(places) % self._unit if self._unit else self._num_places
        num_places = min(self._num_places, left)
        places = [place if place < num_places else SPARE for place in places]
        spares = [rank for rank, place in enumerate(places) if place == SPARE]
        empty = sorted({*range(num_places)} - {*places})
        for place in empty[: len(spares)]:
            taken = min(spares, key=lambda rank: (hosts[rank] != host_of[place], rank))
            spares.remove(taken)
            places[taken] = place
        self._past += [self._all, kept]
        self._all, self._places, self._hosts = shrunk, places, hosts
        shrunk.together.watch()
        self._num_places = num_places
        if not 0 < num_places <= len(places):
            names = ", ".join(map(str, lost))
            raise RankLostError(
                f"the ranks with places {names} have died, and there are too few spares (recovery.spares): "
                "the run resumes with its next start"
            )
        return lost

    def _shrunk(self) -> "RevocableComm":
        from mpitrain.comm.base.revocable import RevocableComm

        while True:
            shrunk = None
            try:
                shrunk = RevocableComm.first(self._all.Shrink())
                self._all.Ack_failed()
                if self._all.Agree(1):
                    return shrunk
            except MPI.Exception:
                if shrunk is None:
                    self._disagree()

    def _disagree(self) -> None:
        try:
            self._all.Agree(0)
        except MPI.Exception:
            return  # alike on all: they shrink again
