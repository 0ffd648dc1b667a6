"""Around each rank from its first line to its last: where it is, signals, and an end with one report.

    guarded(body, report)  runs body(guard); whatever happens, this rank ends in one of three ways:
          done             MPI is finalised, the exit code returned
          an error of all  the same, after the first rank has reported it: an InputError, or a
                           StoppedEarly
          anything else    one report that names rank, phase and cause, then the whole job is ended
                           (MPI_Abort)

A failing rank frees nothing on its way out: communicators are freed by all ranks together, and the
others are elsewhere.
"""

import faulthandler
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from mpitrain.cluster import watchdog_messages as messages
from mpitrain.cluster.allocation import Allotted
from mpitrain.cluster.launch import launcher_above, rank_of_launcher
from mpitrain.cluster.leave_requests import ASKS, BEFORE_STEPS, LeaveRequests
from mpitrain.cluster.listening_thread import LOOK_S, THREAD, ListeningThread
from mpitrain.cluster.status_board import HUNG, LEFT, NOT_KNOWN, WAITING, RankStatus, with_saved
from mpitrain.cluster.watchdog_client import VERDICT_S, WatchdogClient
from mpitrain.comm.base.world import World, abort, connect, finalize, flush
from mpitrain.errors import (
    FAILED,
    STOPPED_EARLY,
    DeliveryError,
    HangError,
    MpitrainError,
    StoppedEarly,
    library_fault,
    on_all_ranks,
)

MISS_S = 1.0  # for the watchdog to name the other rank, where a message has failed
LIMIT_S = 600.0  # until the configuration is read
FORWARD_S = 0.05  # for a launcher to write what ranks have said before what the watchdog says


class Guard:
    """Of one rank. place: where it is.  requests: why it has to leave.  watchdog: of its node.

    finalizes: whether leaving calls MPI_Finalize.
    """

    def __init__(self):
        self.finalizes = True
        rank, size = rank_of_launcher()
        self.place = RankStatus(rank, f"rank {rank} of {size}", LIMIT_S)
        self.watchdog = WatchdogClient(self.place)
        self.requests = LeaveRequests()
        for name in ASKS:  # nohup, and shells that start something in the background, ignore some
            if signal.getsignal(name) != signal.SIG_IGN:
                signal.signal(name, _heard_by_the_thread)
        os.register_at_fork(after_in_child=self._forget_in_child)
        # the watchdog asks for the stack of a rank that is stuck
        faulthandler.register(signal.SIGUSR2, self.watchdog.console, all_threads=False)
        try:
            ListeningThread(self.place, self.requests, self.watchdog).start()
        except RuntimeError:
            self.watchdog.refuse()
        self.watchdog.begin()

    def _forget_in_child(self) -> None:
        """Let a script's child hear its own signals, and not hide this rank's end."""
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(-1)
            for name in ASKS:
                if signal.getsignal(name) is _heard_by_the_thread:
                    signal.signal(name, signal.SIG_DFL)
            self.watchdog.close_lifeline()

    def connect(self, may_be_alone: bool = False, revocable: bool = False) -> World:
        """Start MPI, join its world, and have one watchdog for the ranks of a node.

        Collective over all ranks; raises MeshError.

        may_be_alone, revocable: see comm.base.world.connect().
        """
        world = connect(self.place, lambda: bool(self.requests.why()), may_be_alone, revocable)
        self.watchdog.join(world)
        return world

    def watch(self, time: Allotted | None) -> None:
        """Have this rank leave before its time is over."""
        self.requests.time = time
        self.watchdog.wake()

    def leave_if_asked(self, world: World, *kept: str) -> None:
        """Raise StoppedEarly with `kept` on all ranks if one has to leave. Collective over all."""
        phase = self.place.phase
        if why := world.first_of("whether to leave", self.requests.why()):
            raise on_all_ranks(StoppedEarly(phase, why, *kept))

    # ------------------------------------------------------------ how a rank ends

    def leave(self, code: int) -> None:
        """End in good order, with this exit code. Collective over all ranks.

        Open MPI's launcher, asked to end, kills ranks in MPI_Finalize and drops what they have
        said: the watchdog says it before.
        """
        self.place.enter("end", "in MPI_Finalize" if self.finalizes else "leaving", WAITING)
        if self.requests.num_asked and code == STOPPED_EARLY and self.place.saved != NOT_KNOWN:
            self._say_left()
        above = launcher_above()
        above.go_on()  # Open MPI's takes part in MPI_Finalize
        above.close()
        self.watchdog.proceed()
        if self.finalizes:
            finalize()
        self.place.enter("end", "leaving", LEFT)
        # srun ends the others when the first leaves with 75; Python forgets handlers as it ends
        for name in ASKS:
            signal.signal(name, signal.SIG_IGN)

    def _say_left(self) -> None:
        flush()
        time.sleep(FORWARD_S)
        text = with_saved(f"mpitrain: asked to leave ({self.requests.asked_by})", self.place.saved)
        with suppress(OSError):
            self.watchdog.tell(messages.LEAVES, 0, text)

    def answer(self, error: BaseException, report: Callable[[MpitrainError], None]) -> int:
        """Have `report` show an error of all ranks; return its exit code. Others end the job."""
        error = library_fault(error) or error
        if not (isinstance(error, MpitrainError) and error.everywhere):
            self.fail(error)
        report(error)
        return error.exit_code

    def fail(self, error: BaseException) -> None:
        """Report what happened to this rank, and end the whole job; does not return."""
        try:
            where = self.place.read()
            if isinstance(error, DeliveryError):
                time.sleep(MISS_S)
            if isinstance(error, HangError):
                self.place.enter(where.phase, where.what, HUNG)
                self.watchdog.end_job(f"mpitrain: {where}: {error.args[0]}", FAILED, messages.GAVE_UP)
            elif isinstance(error, KeyboardInterrupt):
                self.watchdog.end_job(f"mpitrain: {where.describe(' was interrupted')}", FAILED)
            else:
                early = where.phase in BEFORE_STEPS and isinstance(error, MpitrainError)
                self.watchdog.end_job(
                    f"{_traceback(error)}mpitrain: {where.describe(' failed')}: {_cause(error)}",
                    error.exit_code if early else FAILED,
                )
            if self.watchdog.undelivered is not None:
                # meanwhile the thread hears the watchdog, or speaks for it
                time.sleep(VERDICT_S + 2 * LOOK_S)
        finally:
            abort(FAILED)

    def end(self, cause: str) -> None:
        """Report trouble that a thread of this rank has found, and end the job."""
        self.watchdog.end_job(f"mpitrain: {self.place.read().describe(' failed')}: {cause}", FAILED)


def guarded(body: Callable[[Guard], int], report: Callable[[MpitrainError], None]) -> int:
    """Run body(guard); return the exit code. Collective. report: shows an error of all ranks."""
    guard = Guard()
    try:
        code = body(guard)
    except BaseException as error:
        code = guard.answer(error, report)
    guard.leave(code)
    return code


def is_guarded() -> bool:
    """Return whether this process has a guard, or had one: MPI starts once in a process."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def _heard_by_the_thread(*signal_and_frame: object) -> None:
    """Do nothing: without a handler a signal would end the process."""


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, MpitrainError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _traceback(error: BaseException) -> str:
    """Return where an error came from, if it is one that nobody expected."""
    expected = isinstance(error, MpitrainError) or not isinstance(error, Exception)
    return "" if expected else "".join(traceback.format_exception(error))
