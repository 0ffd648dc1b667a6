"""Started operations, and the one place that moves them forward.

An operation is a plain function that returns steps. Called on all ranks in the same order, it takes
what it is matched by: tags, a place in a queue. Its steps, a generator, post messages, yield a
function that says whether they have arrived, add what came, and post the next ones. They begin when
the data is there, on every rank at another time, and take nothing that is counted.

MPI doesn't advance by itself, so every wait for one operation advances all of them: otherwise rank
0 could wait for A while rank 1 waits for the second phase of B, for ever.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import sched_yield
from typing import Any, NamedTuple

from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.mpi_errors import error_in_status, error_of_operation
from mpitrain.comm.base.world import NULL_REPORTER, ExpectedAction, StatusReporter
from mpitrain.comm.meters.account import Account
from mpitrain.comm.meters.clocks import Mark, Spans
from mpitrain.errors import HangError, MeshError

# one that has waiting_on(), too, tells which ranks it waits for; any other is a turn in a queue
Ready = Callable[[], bool]
Steps = Iterator[Ready]

# poll this long, then sleep between polls: with more ranks than cores the others need the core
SPIN_S = 0.0002
NAP_S = 0.00005
STOOD_STILL_S = 5.0  # between two looks: hundreds of ranks on a few cores wait far less
BLAME_S = 0.001  # who is waited for is asked so often; shorter waits are nobody's
NOTE_S = 0.25  # a wait of this length is noted for those who watch, and noted anew every so often
CROWD = 8  # ranks a core from which naps grow with the wait: others need the core
CROWDED_NAPS = 0.25  # of the time waited so far, and at most
LONGEST_NAP_S = 0.1


class Posted(NamedTuple):
    """A message under way. ranks: of the world, at its other end; of one of MPI's own collectives, all."""

    request: MPI.Request
    ranks: Sequence[int]


class Arrived:
    """Whether all of some messages have arrived."""

    def __init__(self, posted: Sequence[Posted]):
        self._requests = [message.request for message in posted]
        self._ranks = [message.ranks for message in posted]
        self._statuses = [MPI.Status() for _ in posted]

    def __call__(self) -> bool:
        try:
            return MPI.Request.Testall(self._requests, self._statuses)
        except MPI.Exception as error:
            raise error_in_status(error, self._statuses) from error

    def waiting_on(self) -> set[int]:
        """Return the ranks whose messages haven't arrived, or that haven't taken theirs."""
        return {
            rank
            for request, ranks in zip(self._requests, self._ranks)
            if not request.Test()
            for rank in ranks
        }


class Pending:
    """A started operation, on its axis's account. It owns its buffers until wait() returns.

    expected: what other ranks have to do for it.
    """

    def __init__(
        self,
        steps: Steps,
        progress: "Progress",
        what: object,
        account: Account,
        result: Any,
        expected: ExpectedAction,
    ):
        self.what = what
        self.done = False
        self.account = account
        self.expected = expected
        self._steps = steps
        self._progress = progress
        self._result = result
        self._ready: Ready | None = None

    def test(self) -> bool:
        """Advance as far as possible without waiting; return whether the operation is complete."""
        if self.done:
            return True
        try:
            if self._ready is not None and not self._ready():
                return False
            begin = self.account.clock.mark()
            self._advance()
        except MPI.Exception as error:
            raise error_of_operation(self.what, error) from error
        self._progress.advanced(self, begin)
        return self.done

    def _advance(self) -> None:
        try:
            self._ready = next(self._steps)
            while self._ready():
                self._ready = next(self._steps)
        except StopIteration:
            self.done = True

    def wait(self) -> Any:
        """Wait until the operation is complete and return its result.

        Raises HangError after the time limit, MessageError for a message of another length than was
        due, and DeliveryError for one that MPI failed to deliver.
        """
        self._progress.wait(self)
        return self._result

    def foremost(self) -> "Pending":
        """Return what is waited for: this one or, before its turn, the oldest on its axis."""
        if hasattr(self._ready, "waiting_on"):
            return self
        return next(
            (
                pending
                for pending in self._progress.active
                if pending.account is self.account and not pending.done
            ),
            self,
        )

    def waiting_on(self) -> list[int]:
        """Return the other ranks that it waits for; none: it waits for this rank's own device."""
        try:
            waiting_on: Iterable[int] = getattr(self._ready, "waiting_on", tuple)()
        except MPI.Exception as error:
            raise error_of_operation(self.what, error) from error
        return sorted(rank for rank in waiting_on if rank != self._progress.rank)


class Progress:
    """All operations in flight on this rank. Times are those of the accounts' clocks.

    timeout_s: None waits for ever.  place: notes waits that last.  rank: this one, of the world.
    num_neighbours: ranks on this node, which have `num_cores` cores for them all.
    """

    def __init__(
        self,
        timeout_s: float | None = None,
        place: StatusReporter = NULL_REPORTER,
        rank: int = -1,
        num_neighbours: int = 1,
        num_cores: int = 1,
    ):
        self.timeout_s = timeout_s
        self.place = place
        self.rank = rank
        self._waited = Spans()
        self._crowded = num_neighbours >= CROWD * num_cores
        self.active: list[Pending] = []
        self._waiting = False
        self._waited_for = defaultdict[int, float](float)
        self._thread: ProgressThread | None = None

    def start(
        self,
        steps: Steps,
        what: object,
        account: Account,
        result: Any = None,
        *,
        expected: ExpectedAction | None = None,
    ) -> Pending:
        """Run an operation's first phase; return its Pending. what: names it in a hang report."""
        pending = Pending(steps, self, what, account, result, expected or ExpectedAction(self.place.what))
        account.begun(account.clock.mark())
        if not pending.test():
            self.active.append(pending)
        return pending

    def poll(self) -> None:
        """Advance everything in flight, oldest first, without waiting."""
        if self.active:
            self.active = [pending for pending in self.active if not pending.test()]

    def advanced(self, pending: Pending, begin: Mark) -> None:
        """Book that an operation was advanced from `begin` on; in wait() for the one waited for."""
        now = pending.account.clock.mark()
        if not self._waiting:
            pending.account.blocked(begin, now)
        if pending.done:
            pending.account.ended(now)

    @property
    def waited_s(self) -> float:
        """The time spent in wait() so far. Waits for a device: not within a step."""
        return self._waited.sum_s

    def waited_for(self) -> dict[int, float]:
        """Return the seconds for which each rank was waited for; several at once share them."""
        return dict(self._waited_for)

    def _blame(self, waiting_on: Sequence[int], seconds: float) -> None:
        for rank in waiting_on:
            self._waited_for[rank] += seconds / len(waiting_on)

    def wait(self, pending: Pending) -> None:
        """Advance everything until `pending` is complete."""
        if pending.done:
            return
        clock = pending.account.clock
        self._waiting = True
        begin = clock.mark()
        try:
            self._until_done(pending)
        finally:
            self._waiting = False
            end = clock.mark()
            self._waited.add(clock, begin, end)
            pending.account.blocked(begin, end)

    def _until_done(self, pending: Pending) -> None:
        begin = time.perf_counter()
        noted_s = 0.0
        blamed_s = 0.0
        looked = begin
        while True:
            self.poll()
            if pending.test():
                if noted_s:
                    self.place.waits_no_more()
                return
            now = time.perf_counter()
            # this process, or the machine: a job that was suspended hasn't waited meanwhile
            if now - looked > STOOD_STILL_S:
                begin += now - looked
            looked = now
            waited_s = now - begin
            if self.timeout_s is not None and waited_s > self.timeout_s:
                raise HangError(f"waited {waited_s:.0f} s for {pending.what}")
            if waited_s > blamed_s + BLAME_S:
                foremost = pending.foremost()
                waiting_on = foremost.waiting_on()
                self._blame(waiting_on, waited_s - blamed_s)
                blamed_s = waited_s
                if waited_s > noted_s + NOTE_S:
                    self.place.waits_for(str(foremost.what), waiting_on, foremost.expected)
                    noted_s = waited_s
            if waited_s < SPIN_S and not self._crowded:
                sched_yield()
            else:
                time.sleep(
                    max(NAP_S, min(waited_s * CROWDED_NAPS, LONGEST_NAP_S)) if self._crowded else NAP_S
                )

    def start_thread(self, comm: MPI.Intracomm, first: Callable[[], None] | None = None) -> None:
        """Let a thread of this rank enter MPI while the rank computes; needs MPI_THREAD_MULTIPLE.

        comm: the thread's alone.  first: what it does before it enters MPI; raises here.
        Raises MeshError if no thread can be started.
        """
        self._thread = ProgressThread(comm, self, first)
        try:
            self._thread.start()
        except RuntimeError:
            raise MeshError('comm.progress = "thread": no thread can be started; use "poll"') from None
        self._thread.ready()

    def stop_thread(self) -> None:
        """End the thread, if there is one."""
        if self._thread is not None:
            self._thread.stop()
            self._thread = None

    def abandon(self) -> list[Pending]:
        """Return what is in flight, when a rank has died.

        MPI may still write into its buffers: keep it.
        """
        if self._thread is not None:
            self._thread.leave()
        return self.active

    def drain(self) -> None:
        """Wait for everything in flight."""
        while self.active:
            self.wait(self.active[0])
            self.poll()


class ProgressThread(threading.Thread):
    """Enters MPI while operations are in flight, so that bytes move while the rank computes.

    Messages over a network advance only inside MPI calls: a probe, for nobody, moves them all. What
    follows an arrival is left to the rank's own poll(); the two share no state.
    """

    PAUSE_S = 0.0005
    # probes in a row: one entry moves only as much as one read or write of a socket takes
    BURST = 16

    def __init__(self, comm: MPI.Intracomm, progress: Progress, first: Callable[[], None] | None):
        super().__init__(name="mpitrain-progress", daemon=True)
        self._comm = comm
        self._progress = progress
        self._over = threading.Event()
        self._first = first
        self._begun = threading.Event()
        self._error: BaseException | None = None

    def ready(self) -> None:
        """Wait until the thread has begun. Raises what went wrong there."""
        self._begun.wait()
        if self._error is not None:
            raise self._error

    def run(self) -> None:
        """Begin, and then poke until it is over.

        A device belongs to a thread: MPI's engine, entered by one that has set none, asks the
        driver about another context's events, and dies (UCX in cuEventQuery: nixl#2102; Open MPI:
        ompi#627).
        """
        try:
            if self._first is not None:
                self._first()
        except BaseException as error:
            self._error = error
        self._begun.set()
        if self._error is None:
            self._poke()

    def _poke(self) -> None:
        while not self._over.wait(self.PAUSE_S):
            for _ in range(self.BURST if self._progress.active else 0):
                try:
                    self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
                except MPI.Exception:  # a rank has died: the rank itself finds out
                    return

    def leave(self) -> None:
        """Have the thread end soon."""
        self._over.set()

    def stop(self) -> None:
        """End the thread and free its communicator. Collective, because of the communicator."""
        self._over.set()
        self.join()
        self._comm.Free()
