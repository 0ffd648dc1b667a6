"""`mpitrain run` on all ranks it was started with, some of which may die (recovery.spares, .shrink).

    join       MPI starts; the configuration is the same on all ranks
    a round    ranks with a place in the layout open the run and train; spares wait, with torch loaded
    its end    all ranks agree whether it ended well. If a rank has died, spares take the places of
               the dead (comm/base/spare_ranks.py), or there are fewer data ranks (recovery.shrink);
               the next round begins as a start does: from copies in memory, or a checkpoint

Without spares and recovery.shrink there is one round, and a death ends the job.
"""

import gc
import math
import threading
import time
from collections.abc import Callable

from mpitrain.cluster import entry
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.logs import OpenStreams
from mpitrain.cluster.status_board import BUSY, WAITING
from mpitrain.comm.base.mpi_errors import is_of_lost_rank
from mpitrain.comm.base.spare_ranks import SPARE, SpareRanks
from mpitrain.comm.base.world import World
from mpitrain.errors import InputError, MpitrainError
from mpitrain.plan.settings.partner import ranks_of_replica
from mpitrain.training.agreement import watch_time
from mpitrain.training.prepare import JoinedRanks, join_ranks, open_joined
from mpitrain.training.replay.record_request import RecordRequest
from mpitrain.training.run_opening import PreparedRun

SAVING = "mpitrain-save"  # the thread of a save under way


def run(
    path: str | None,
    overrides: tuple[str, ...],
    guard: Guard,
    record: RecordRequest | None,
    calibrate: str | None,
) -> int:
    """Open a run and train; return the exit code. Collective over all ranks; raises as open_joined() does."""
    joined = join_ranks(path, overrides, guard)
    one_round = _Round(guard, record, calibrate)
    if not joined.survives:
        return one_round.train(joined)
    return _Rounds(joined, one_round, guard).run()


class _Round:
    """What a rank with a place does in a round. opened: the run of the last one."""

    def __init__(self, guard: Guard, record: RecordRequest | None, calibrate: str | None):
        self._guard = guard
        self._record = record
        self._calibrate = calibrate
        self._train: Callable[..., int] | None = None
        self.opened: PreparedRun | None = None

    def train(self, joined: JoinedRanks) -> int:
        """Open the run and train, with the ranks of `joined` alone; return the exit code."""
        opened = self.opened = open_joined(joined, self._guard, self._record)
        with opened.rundir:
            self._guard.place.enter("build", "loading torch", BUSY)
            train = self.loaded()
            return train(opened, joined.world, self._guard, self._record, self._calibrate)

    def loaded(self) -> Callable[..., int]:
        """Return what trains; the first call loads torch."""
        if self._train is None:
            with entry.loading():
                from mpitrain.training.trainers import run as train

            self._train = train
        return self._train

    def leave(self) -> None:
        """Let go of the run of the last round, whose ranks aren't all there any more. It sends nothing."""
        opened, self.opened = self.opened, None
        if opened is not None:
            opened.loggers.end(0.0)
        for thread in threading.enumerate():
            if thread.name == SAVING:  # else it would write into a folder of the next round
                thread.join()
        if opened is not None:
            opened.rundir.release()
        gc.collect()  # the actor of the round


class _Rounds:
    """The rounds of this rank, until one ends well. Construction is collective over all ranks."""

    def __init__(self, joined: JoinedRanks, one_round: _Round, guard: Guard):
        self._joined = joined
        self._config = joined.asked.config
        self._round = one_round
        self._guard = guard
        self._place = guard.place
        self._number = guard.place.rank  # by the launcher
        self._notes = joined.notes
        self._error: MpitrainError | None = None  # that ended a round on all ranks
        self._world: World | None = None  # of the round, on a rank with a place
        self._repairs = 0
        self._streams = OpenStreams()
        self._limit_s = Limit(self._config.comm.timeout_s).seconds
        recovery = self._config.recovery
        unit = ranks_of_replica(self._config) if recovery.shrink else 0
        with guard.place.waiting("for all ranks: their hosts"):
            self._spares = SpareRanks(joined.world.comm, recovery.spares, unit)
        guard.watchdog.expect_spares()
        # Open MPI's hangs now and then when a rank has died; mpirun --with-ft ulfm needs none
        guard.finalizes = False

    def run(self) -> int:
        """Do rounds; return the exit code, or raise what ended the last one on all ranks."""
        while True:
            code = self._end_of_round()
            with self._place.at("repair", "agreeing whether all ranks are there", WAITING):
                well = self._spares.ended_well(code is not None)
            if code is not None and well:
                if self._error is not None:
                    if self._spares.place == 0 and self._number:  # who would report it is dead
                        entry.warn(str(self._error))
                    raise self._error
                return code
            self._repair()

    def _end_of_round(self) -> int | None:
        """Take part in a round; return its exit code, None if a rank has died."""
        spares = self._spares
        self._error = self._world = None
        try:
            with self._place.waiting("for all ranks that live, to begin a round"):
                spares.make_layout()
            if spares.place == SPARE:
                return self._wait()
            code = self._take_part()
            spares.tell_end(code)
            return code
        except Exception as error:
            if self._is_broken_by(error):
                return None
            if not (isinstance(error, MpitrainError) and error.everywhere):
                raise
            return self._ended_by(error)

    def _is_broken_by(self, error: Exception) -> bool:
        """Return whether a rank has died; then wake the others."""
        broken = is_of_lost_rank(error) or self._spares.is_broken()
        if broken:
            self._spares.revoke()
        return broken

    def _ended_by(self, error: MpitrainError) -> int | None:
        """Have a round end with an error of all its ranks."""
        if self._repairs and isinstance(error, InputError):  # nobody has changed what was given
            raise MpitrainError(f"after the death of a rank: {error}") from None
        self._error = error.with_traceback(None)
        try:
            self._spares.tell_end(error.exit_code)
        except Exception as lost:
            if not self._is_broken_by(lost):
                raise
            return None
        return error.exit_code

    def _wait(self) -> int:
        """Be a spare until a round is over."""
        self._place.name(f"spare rank {self._number}", math.inf)
        self._place.enter("spare", "loading torch", BUSY)
        self._round.loaded()
        self._place.enter("spare", "waiting for the death of a rank, or the end of the run", WAITING)
        code = self._spares.wait_for_end()
        self._place.name(self._place.who, self._limit_s)
        return code

    def _take_part(self) -> int:
        spares, place = self._spares, self._place
        layout = spares.layout
        place.rank = spares.place
        place.name(f"rank {layout.rank} of {layout.size}", self._limit_s)
        place.moved(0, 0, "beginning a round")
        place.enter("start", "meeting the other ranks", WAITING)
        self._world = world = World(layout, place, lambda: bool(self._guard.requests.why()))
        if self._repairs and world.rank == 0 and self._guard.requests.time is None:
            watch_time(self._config, self._guard, self._notes.append)
        return self._round.train(self._joined._replace(world=world, notes=[*self._notes]))

    def _repair(self) -> None:
        """Give the places of the dead to spares. Collective over all that live; raises RankLostError."""
        begin_s = time.monotonic()
        place = self._place
        self._spares.revoke()
        self._guard.requests.is_unsaved = bool(self._config.recovery.every)  # until it is known
        place.name(place.who, self._limit_s)
        place.enter("repair", "waiting for a save under way", BUSY)
        in_flight = None if self._world is None else self._world.in_flight
        self._world = None
        self._round.leave()
        self._streams.restore()
        before = self._spares.num_places
        with place.at("repair", "for all ranks that live, to replace the dead", WAITING):
            lost = self._spares.repair(in_flight)
        self._repairs += 1
        seconds = time.monotonic() - begin_s
        names = f"rank{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
        taken = f"spares took the place{'s' * (len(lost) > 1)} of {names}" if lost else "a spare has died"
        if self._spares.num_places < before:
            taken = f"{names} of {before} died, and the run resumes with {self._spares.num_places}"
        self._notes = [f"repaired in {seconds:.2f} s: {taken}, spares left: {self._spares.num_left}"]
