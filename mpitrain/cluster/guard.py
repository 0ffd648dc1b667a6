"""Around each rank from its first line to its last: where it is, signals, and an end with one report.

    guarded(body, tell)      runs body(guard); whatever happens, this rank ends in one of three ways:
        done                     MPI is finalised, the exit code returned
        an InputError of all     the same, after the first rank has told it
        anything else            one report that names rank, phase and cause, then the whole job is ended (MPI_Abort)

A failing rank frees nothing on its way out: communicators are freed by all ranks together, and the others are elsewhere.

Until the ranks of a node have a watchdog, and where none can be started, a thread of each rank watches the rank's own limit; until then the
first watch (first_watch.py) says which rank is gone.
"""

import faulthandler
import os
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
from mmap import mmap

from mpitrain.cluster import watchdog
from mpitrain.cluster.behind import MOST_NAMED
from mpitrain.cluster.board import HUNG, LEFT, SLOT, WAITING, Place
from mpitrain.cluster.first_watch import OVER, WATCHED, join_first_watch
from mpitrain.cluster.launch import elsewhere, rank_of_launcher
from mpitrain.cluster.nodes import Meeting, addresses_here, told_apart
from mpitrain.cluster.processes import condition_of, start_apart
from mpitrain.comm.world import STARTING, World, abort, finalize
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
        rank, size = rank_of_launcher()
        self.place = Place(rank, f"rank {rank} of {size}", LIMIT_S)
        self.num_asked = 0
        self._asked_at, self._activity = -ECHO_S, watchdog.Activity()
        self._watchdog: socket.socket | None = None
        self._first = join_first_watch(self.place.who)
        self._wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        for name in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(name, _heard_by_the_thread)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # while this one is inside MPI, too
        self._wake = wake
        self._console = os.dup(2)  # what ends a job is told there, also when this rank writes to a log (run.logs)
        faulthandler.register(signal.SIGUSR2, self._console, all_threads=False)  # the watchdog asks for the stack of a rank that is stuck
        threading.Thread(target=self._attend, name="mpitrain-guard", daemon=True).start()

    # ------------------------------------------------------------ the watchdog of the node

    def join(self, world: World) -> None:
        """Start the node's watchdog on its first rank, and put this rank's place on its board. Collective over all ranks."""
        meeting, door = _meet(world)
        with self.place.waiting("joining the watchdog of this node"):
            offer = self._start(world, meeting, door) if world.node.rank == 0 else None
            where = world.node.bcast(offer and offer[0])
            if where:
                self._connect(*where, world.node.rank, world.node.size)
            world.node.Barrier()
            for descriptor in offer[1] if offer else ():
                os.close(descriptor)
        self._speak_for_itself()

    def _start(self, world: World, meeting: Meeting, door: socket.socket | None) -> tuple[tuple[str, str], tuple[int, ...]] | None:
        """Start the watchdog. Return its address and its board's, and descriptors to close when all ranks are connected."""
        if not sys.platform.startswith("linux"):
            return None  # it reads /proc
        address = f"\0mpitrain-{os.getpid()}-{time.time_ns():x}"  # a name without a file: needs no disk, goes with the process
        try:
            board = os.memfd_create("mpitrain-board", os.MFD_CLOEXEC)
            os.truncate(board, world.node.size * SLOT)
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            listener.bind(address)
            listener.listen(world.node.size)
            told = meeting.written()
            passed = listener.fileno(), board, told, *([door.fileno()] if door else [])
            start_apart("mpitrain-watchdog", watchdog.__name__, (world.node.size, int(self._first is None)), passed)
        except OSError as error:
            sys.stderr.write(f"mpitrain: no watchdog on this node ({error}): a rank that is stopped or killed won't be named\n")
            return None
        return (address, f"/proc/{os.getpid()}/fd/{board}"), (listener.detach(), board, told, *([door.detach()] if door else []))

    def _connect(self, address: str, board: str, slot: int, num_slots: int) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(READY_S)
        try:
            with open(board, "r+b") as file:
                memory = memoryview(mmap(file.fileno(), num_slots * SLOT))
            self.place.take(memory[slot * SLOT : (slot + 1) * SLOT])
            connection.connect(address)
            connection.send(b"%d" % slot)
            if connection.recv(len(watchdog.READY)) != watchdog.READY:  # from here on it sees what happens
                raise ConnectionError("it has ended")
            if self._first is not None:  # at once: for a rank that is gone before, the other answers
                with suppress(OSError):
                    self._first.send(b"%s %d %s" % (WATCHED, num_slots, address[1:].encode()))
        except OSError as error:
            sys.stderr.write(f"mpitrain: {self.place.who}: the watchdog of this node can't be reached ({error})\n")
            return
        connection.settimeout(None)
        self._watchdog = connection
        os.write(self._wake, b"\0")  # the thread has one more to listen to

    # ------------------------------------------------------------ the thread

    def _attend(self) -> None:
        """Listen to signals and to the watchdog; without one, watch the limit."""
        while True:
            known = [each for each in (self._watchdog, self._first) if each is not None]
            ready, _, _ = select.select([self._wakes, *known], [], [], None if self._watchdog else LOOK_S)
            if self._wakes in ready:
                self._signalled(os.read(self._wakes, 512))
            for each in known:
                if each in ready:
                    self._heard(each)
            if not ready:
                self._look()

    def _heard(self, watch: socket.socket) -> None:
        """End the job as a watch says; forget one that has ended itself."""
        try:
            verdict = watch.recv(16)
        except ConnectionResetError:  # it ended before it had read all that this rank said
            verdict = b""
        if verdict:
            abort(int(verdict))
        if watch is self._watchdog:
            self._watchdog = None
        else:
            self._first = None

    def _signalled(self, numbers: bytes) -> None:
        """Leave now if there is nothing to save yet; steps end with a checkpoint first (training/leaving.py), but for a third request."""
        now, asked = time.monotonic(), any(number in (signal.SIGUSR1, signal.SIGTERM) for number in numbers)
        if asked and now - self._asked_at > ECHO_S:
            self.num_asked, self._asked_at = self.num_asked + 1, now
        if self._watchdog is None and signal.SIGTERM in numbers:
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
            self._print(report)
            abort(FAILED)

    # ------------------------------------------------------------ how a rank ends

    def leave(self) -> None:
        """End in good order. Collective over all ranks."""
        self._speak_for_itself()
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
        sys.stdout.flush()
        try:
            if self._watchdog is not None:
                self._watchdog.send(kind + b"%d " % code + report.encode(errors="replace")[-MOST_TEXT:])
                return
        except OSError:
            self._watchdog = None  # it is gone
        self._print(report)
        abort(code)

    def _print(self, report: str) -> None:
        """Say why the job ends, where no watchdog does."""
        self._speak_for_itself()
        try:
            os.write(self._console, f"{report}\n".encode(errors="replace"))
        except OSError:
            return  # nobody listens; the job is ended all the same

    def _speak_for_itself(self) -> None:
        """Have the first watch say nothing about ranks that end from now on."""
        first, self._first = self._first, None
        if first is not None:
            with suppress(OSError):
                first.send(OVER)


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
