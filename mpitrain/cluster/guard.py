"""Around each rank from its first line to its last: where it is, signals, and an end with one report.

    guarded(body, tell)      runs body(guard); whatever happens, this rank ends in one of three ways:
        done                     MPI is finalised, the exit code returned
        an InputError of all     the same, after the first rank has told it
        anything else            one report that names rank, phase and cause, then the whole job is ended (MPI_Abort)

A failing rank frees nothing on its way out: communicators are freed by all ranks together, and the others are elsewhere.

Until MPI has started, when the watchdog of the node is told which ranks there are, and where there is none, a thread of each rank watches
the rank's own limit.
"""

import faulthandler
import os
import queue
import secrets
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from mpitrain.cluster import console, finding, watchdog
from mpitrain.cluster.behind import MOST_NAMED
from mpitrain.cluster.board import HUNG, LEFT, WAITING, Place, shared_slot
from mpitrain.cluster.launch import elsewhere, rank_of_launcher
from mpitrain.cluster.nodes import Meeting, addresses_here, told_apart
from mpitrain.cluster.processes import condition_of, peer_of
from mpitrain.comm.world import STARTING, World, abort, finalize, flush
from mpitrain.errors import FAILED, STOPPED_EARLY, HangError, InputError, MpitrainError

LOOK_S = 0.25
READY_S = 20.0  # for a process to start, on a node where all ranks do
VERDICT_S = 15.0  # for the watchdog to report and end the job; then a rank does it itself
TERM_S = 3.0  # Open MPI sends SIGTERM when another rank has failed, SIGKILL 2 s later; who lives longer was asked by somebody else
ECHO_S = 2.0  # one request comes several times: from the scheduler, from the shell of the job, and through mpirun
STAGGER_S = 1.5  # without a watchdog first ranks speak first, and end the job before others do
LIMIT_S = 600.0  # until the configuration is read
BEFORE_STEPS = ("start", "tokens", "build", "resume")
MOST_TEXT = 60_000  # bytes of a report: one message to the watchdog


class Guard:
    """Of one rank. `place` says where it is, `num_asked` how many times a signal asked it to leave (the first two count, see Leaving)."""

    def __init__(self):
        # Before this rank opens anything else. When a process ends, what it has open is closed in the order of the numbers, and
        # the watchdog is to learn of it before the launcher does, which ends the others in no time. Its own socket is no. 9 under MPICH.
        self._lifeline, self._alive = os.pipe()
        found = _found()
        rank, size = rank_of_launcher()
        self.place = Place(rank, f"rank {rank} of {size}", LIMIT_S)
        self.num_asked = 0
        self._asked_at, self._activity = -ECHO_S, watchdog.Activity()
        self._slot: int | None = None
        self._watchdog: socket.socket | None = None
        self._joined = False
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # of the watchdog
        self._wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        for name in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(name, _heard_by_the_thread)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # while this one is inside MPI, too
        self._wake = wake
        self._console = os.dup(2)  # what ends a job is told there, also when this rank writes to a log (run.logs)
        faulthandler.register(signal.SIGUSR2, self._console, all_threads=False)  # the watchdog asks for the stack of a rank that is stuck
        threading.Thread(target=self._attend, name="mpitrain-guard", daemon=True).start()
        with suppress(OSError, queue.Empty):
            self._share()
            self._be_known(found)

    # ------------------------------------------------------------ the watchdog of the node

    def _share(self) -> None:
        """Move this rank's place to where a watchdog can see it. Raises OSError."""
        if self._slot is None:
            self._slot, memory = shared_slot()
            self.place.take(memory)

    def _be_known(self, connection: socket.socket | None) -> None:
        """Go on when a watchdog sees what happens to this rank, and no other one does. Raises OSError or queue.Empty."""
        if connection is None:
            return
        known, self._watchdog = self._watchdog, connection
        os.write(self._wake, b"\0")  # the thread has another to listen to
        if self._answer_of(connection, watchdog.GREETING, self._slot, self._lifeline) != watchdog.READY:
            raise ConnectionError("it has ended")
        self._part_from(known)

    def _answer_of(self, connection: socket.socket, message: bytes, *given: int) -> bytes:
        """Send a watchdog a message with descriptors, and return what it answers to the thread. Raises OSError or queue.Empty."""
        self._answers = queue.SimpleQueue()  # that one has ended may be in the other
        socket.send_fds(connection, [message], given)
        return self._answers.get(timeout=READY_S)

    def join(self, world: World) -> None:
        """Have one watchdog for the ranks of this node, which knows those of other nodes. Collective over all ranks."""
        meeting, door = _meet(world)
        with self.place.waiting("joining the watchdog of this node"):
            known = world.node.allgather(0 if self._watchdog is None else peer_of(self._watchdog).pid)
            self._joined = 0 not in known and len(set(known)) == 1 and self._introduced(world, meeting, door)
            if not self._joined and self._anew(world):
                self._joined = self._introduced(world, meeting, door)
            if not self._joined:
                self._part_from(self._watchdog)
                self._watchdog = None
        if door is not None:
            door.close()
        os.write(self._wake, b"\0")  # the thread listens to another, or looks no more

    def _introduced(self, world: World, meeting: Meeting, door: socket.socket | None) -> bool:
        """Tell the watchdog which ranks are here. Return whether it watches them. Collective over the ranks of this node."""
        return world.node.bcast(self._introduce(world.node.size, meeting, door) if world.node.rank == 0 else None)

    def _introduce(self, num_ranks: int, meeting: Meeting, door: socket.socket | None) -> bool:
        connection = self._watchdog
        if connection is None:
            return False
        try:
            told = meeting.written()
        except OSError:
            return False
        try:
            given = self._console, told, *([] if door is None else [door.fileno()])
            return self._answer_of(connection, watchdog.MEET + b"%d" % num_ranks, *given) == watchdog.READY
        except (OSError, queue.Empty):
            return False
        finally:
            os.close(told)

    def _anew(self, world: World) -> bool:
        """Start a watchdog for the ranks of this node; return whether all are connected. Collective over these ranks."""
        address = world.node.bcast(self._start() if world.node.rank == 0 else None)
        if not address:
            return False
        reached = True
        try:
            self._share()
            self._be_known(finding.connect(address))
        except (OSError, queue.Empty) as error:
            sys.stderr.write(f"mpitrain: {self.place.who}: the watchdog of this node can't be reached ({error})\n")
            reached = False
        return all(world.node.allgather(reached))

    def _start(self) -> str:
        """Start a watchdog and return its address; "" if that can't be."""
        if not sys.platform.startswith("linux"):
            return ""  # it reads /proc
        address = f"\0mpitrain-{os.getpid()}-{time.time_ns():x}"
        try:
            self._share()
            return address if finding.start(address) else ""
        except OSError as error:
            sys.stderr.write(f"mpitrain: no watchdog on this node ({error}): a rank that is stopped or killed won't be named\n")
            return ""

    def _part_from(self, known: socket.socket | None) -> None:
        """Have a watchdog forget this rank. It closes the connection, which the thread may be listening to."""
        if known is not None:
            with suppress(OSError):
                known.send(watchdog.BYE)

    # ------------------------------------------------------------ the thread

    def _attend(self) -> None:
        """Listen to signals and to the watchdog; until one watches the limit, do so."""
        while True:
            known = self._watchdog
            watched = known is not None and self._joined
            ready = _ready([self._wakes, *([] if known is None else [known.fileno()])], None if watched else LOOK_S)
            if self._wakes in ready:
                self._signalled(os.read(self._wakes, 512))
            if known is not None and known.fileno() in ready:
                self._hear(known)
            elif not watched:
                self._look()

    def _hear(self, known: socket.socket) -> None:
        """Take what a watchdog says: an answer, or the code to end the job with."""
        try:
            said = known.recv(16)
        except OSError:
            said = b""
        if not said and self._watchdog is known:
            self._watchdog = None
        if said in (b"", watchdog.READY, watchdog.REFUSED):
            self._answers.put(said)
        else:
            abort(int(said))

    def _signalled(self, numbers: bytes) -> None:
        """Leave now if there is nothing to save yet; steps end with a checkpoint first (training/leaving.py), but for a third request."""
        now, asked = time.monotonic(), any(number in (signal.SIGUSR1, signal.SIGTERM) for number in numbers)
        if asked and now - self._asked_at > ECHO_S:
            self.num_asked, self._asked_at = self.num_asked + 1, now
        if not self._joined and signal.SIGTERM in numbers:
            self._say_asked()
            time.sleep(TERM_S)
        where = self.place.read()
        if self.num_asked > 2 or (self.num_asked and where.phase in BEFORE_STEPS):
            self._end(f"mpitrain: {where.told(' was asked to leave')}; what was saved is whole, start again to go on", STOPPED_EARLY)

    def _look(self) -> None:
        where = self.place.read()
        for_s = self._activity.idle_s(where, time.monotonic())
        if for_s > where.limit_s + STAGGER_S * (self.place.rank.bit_length() + (where.state == WAITING)):
            how = f"waits for other ranks{_absent()}" if where.state == WAITING else "is stuck"
            report = f"mpitrain: {where.told('')}: {how}, for {for_s:.0f} s; the limit is {where.limit_s:g} s (comm.timeout_s)"
            self._end(report, FAILED)
            if self._watchdog is not None:
                _ready([self._watchdog.fileno()], VERDICT_S)
            abort(FAILED)

    def _say_asked(self) -> None:
        """Have the watchdog say nothing of ranks that a launcher ends."""
        if self._watchdog is not None:
            with suppress(OSError):
                self._watchdog.send(watchdog.ASKED)

    # ------------------------------------------------------------ how a rank ends

    def leave(self) -> None:
        """End in good order. Collective over all ranks."""
        self.place.enter("end", "in MPI_Finalize", WAITING)
        finalize()
        self.place.enter("end", "leaving", LEFT)

    def fail(self, error: BaseException) -> None:
        """Report what happened to this rank, and end the whole job; does not return."""
        try:
            where = self.place.read()
            if isinstance(error, HangError):
                self.place.enter(where.phase, where.what, HUNG)
                self._end(f"mpitrain: {where}: {error.args[0]}", FAILED, watchdog.GAVE_UP)
            elif isinstance(error, KeyboardInterrupt):
                self._end(f"mpitrain: {where.told(' was interrupted')}; what was saved is whole, start again to go on", FAILED)
            else:
                early = where.phase in BEFORE_STEPS and isinstance(error, MpitrainError)
                self._end(f"{_traceback(error)}mpitrain: {where.told(' failed')}: {_cause(error)}", error.exit_code if early else FAILED)
            time.sleep(VERDICT_S if self._watchdog else 0)
        finally:
            abort(FAILED)

    def end(self, cause: str) -> None:
        """Report trouble that a thread of this rank has found, and end the job."""
        self._end(f"mpitrain: {self.place.read().told(' failed')}: {cause}", FAILED)

    def _end(self, report: str, code: int, kind: bytes = watchdog.FAILED) -> None:
        """Have the report printed and the job ended: by the watchdog, which prints the first one only, or here."""
        flush()
        try:
            if self._watchdog is not None:
                self._watchdog.send(kind + b"%d " % code + report.encode(errors="replace")[-MOST_TEXT:])
                return
        except OSError:
            self._watchdog = None  # it is gone
        console.write(self._console, report)
        abort(code)


def _ready(descriptors: list[int], timeout_s: float | None) -> set[int]:
    """Wait until there is something to read, or an end; return where. Not by select(): it takes no number above 1023."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


def _found() -> socket.socket | None:
    """Return a connection to the watchdog that this launcher's ranks on this node have from their first line, if they can."""
    with suppress(OSError):
        return finding.of_this_job()
    return None


def _meet(world: World) -> tuple[Meeting, socket.socket | None]:
    """Return how this node's watchdog finds those of the others, and the door of the first node's, on rank 0. Collective."""
    if world.num_nodes == 1:
        return Meeting(names=(os.uname().nodename,)), None
    door, offer = None, None
    if world.rank == 0:
        door = socket.create_server(("", 0), backlog=world.num_nodes)
        offer = addresses_here(), door.getsockname()[1], secrets.token_hex(16)
    every = world.all_gather("meeting the watchdogs of other nodes", (offer, os.uname().nodename, world.node.rank == 0))
    names = [name for _, name, first in every if first]
    node = sum(first for _, _, first in every[: world.rank + 1]) - 1  # right on the first rank of each node, which is asked
    return Meeting(node, told_apart(names), *every[0][0]), door


def guarded(body: Callable[[Guard], int], tell: Callable[[InputError], None]) -> int:
    """Run body(guard) and return the exit code. `tell` shows an error that all ranks have, on the first of them. Collective."""
    guard = Guard()
    try:
        code = body(guard)
    except BaseException as error:
        if not (isinstance(error, InputError) and error.everywhere):
            guard.fail(error)
        tell(error)
        code = error.exit_code
    guard.leave()
    return code


def _heard_by_the_thread(*signal_and_frame: object) -> None:
    """Do nothing: without a handler a signal would end the process, and no thread would hear of it."""


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, MpitrainError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _absent() -> str:
    """Name the ranks of this node that don't wait in MPI_Init, for one that does."""
    found = sorted(elsewhere(STARTING).items())
    missing = [f"rank {rank} has not come: {condition_of(pid, 'it does something else')}" for rank, pid in found]
    return f" ({'; '.join(missing[:MOST_NAMED])})" if missing else ""


def _traceback(error: BaseException) -> str:
    """Return where an error came from, if it is one that nobody expected."""
    expected = isinstance(error, MpitrainError) or not isinstance(error, Exception)
    return "" if expected else "".join(traceback.format_exception(error))
