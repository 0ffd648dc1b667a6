"""Around each rank from its first line to its last: where it is, signals, and an end with one report.

    guarded(body, report)  runs body(guard); whatever happens, this rank ends in one of three ways:
          done             MPI is finalised, the exit code returned
          an error of all  the same, after the first rank has reported it: an InputError, or a
                           StoppedEarly
          anything else    one report that names rank, phase and cause, then the whole job is ended
                           (MPI_Abort)

A failing rank frees nothing on its way out: communicators are freed by all ranks together, and the
others are elsewhere.

Until MPI has started, when the watchdog of the node learns which ranks there are, and where there
is none, a thread of each rank watches the rank's own limit.
"""

import faulthandler
import os
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

from mpitrain.cluster import console, watchdog_rendezvous
from mpitrain.cluster import watchdog_messages as messages
from mpitrain.cluster.activity import Activity
from mpitrain.cluster.allocation import Allotted
from mpitrain.cluster.hang_analysis import MOST_NAMED
from mpitrain.cluster.launch import elsewhere, launched, launcher_above, rank_of_launcher
from mpitrain.cluster.nodes import Meeting, addresses_here, unique_names
from mpitrain.cluster.processes import condition, condition_of, no_more, peer_of, send_signal
from mpitrain.cluster.status_board import (
    HUNG,
    LEFT,
    NOT_KNOWN,
    PHASES,
    WAITING,
    RankStatus,
    shared_slot,
    with_saved,
)
from mpitrain.comm.base.world import STARTING, World, abort, finalize, flush
from mpitrain.errors import (
    BAD_INPUT,
    FAILED,
    STOPPED_EARLY,
    DeliveryError,
    HangError,
    MpitrainError,
    StoppedEarly,
    library_fault,
)

LOOK_S = 0.25
READY_S = 20.0  # for a process to start, on a node where all ranks do
VERDICT_S = 15.0  # for the watchdog to report and end the job; then a rank does it itself
# that a rank whose message has failed waits: the other one may be gone, and the watchdog names it
MISS_S = 1.0
# Open MPI sends SIGTERM when another rank has failed, SIGKILL 2 s later; who lives longer was asked
# by somebody else
TERM_S = 3.0
# one request comes several times: from the scheduler, from the shell of the job, and through mpirun
ECHO_S = 2.0
STAGGER_S = 1.5  # without a watchdog first ranks speak first, and end the job before others do
LIMIT_S = 600.0  # until the configuration is read
KEY_S = 0.3  # without a launcher a key comes once, and a shell's request perhaps twice at once
# between two looks whether the watchdog is stopped, which of two looks have to find
WATCHDOG_S = 2.0
THREAD = "mpitrain-guard"  # lives to the end of the process
ASKS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)  # a rank to leave
BEFORE_STEPS = ("start", "tokens", "build", "resume")  # there is nothing to save in them
# for all ranks to leave together where there is nothing to save; then the job is ended as it is
IN_ORDER_S = 5.0
SAVES_FIRST = "the run ends after this step, with a checkpoint; a second Ctrl-C ends it at once, without"
FORWARD_S = 0.05  # for a launcher to write what ranks have said before what the watchdog says
MOST_TEXT = 60_000  # bytes of a report: one message to the watchdog


class Guard:
    """Of one rank.

    place: where it is.
    num_asked: how many times a signal asked it to leave; the first two count, see Leaving.
    asked_by: the last of these signals.
    time: that the job has, on the rank that knows it.
    """

    def __init__(self):
        # Before this rank opens anything else. When a process ends, what it has open is closed in
        # the order of the numbers, and the watchdog is to learn of it before the launcher does,
        # which ends the others in no time. Its own socket is no. 9 under MPICH.
        self._lifeline, self._alive = os.pipe()
        found = _found()
        rank, size = rank_of_launcher()
        self.place = RankStatus(rank, f"rank {rank} of {size}", LIMIT_S)
        self.num_asked = 0
        self.asked_by = ""
        self.time: Allotted | None = None
        self._unsaved = PHASES[:-1]
        self._leave_by = float("inf")
        self._asked_at = -ECHO_S
        self._activity = Activity()
        self._slot: int | None = None
        self._watchdog: socket.socket | None = None
        # its process; how many looks in a row have found it stopped
        self._watchdog_pid = self._watchdog_seen = 0
        self._look_at = 0.0  # when to look at it
        # a report that it was given, with the exit code, and when to print it here
        self._unheard: tuple[float, str, int] | None = None
        self._meeting: bytes | None = None  # what the first rank of a node tells another watchdog
        # whether the watchdog knows the ranks of this node, and whether there is no other node
        self._joined = self._alone = False
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()  # of the watchdog
        self._wakes, wake = os.pipe()
        os.set_blocking(wake, False)
        for name in ASKS:
            # nohup, and shells that start something in the background, ignore some
            if signal.getsignal(name) != signal.SIG_IGN:
                signal.signal(name, _heard_by_the_thread)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)  # while this one is inside MPI, too
        self._wake = wake
        os.register_at_fork(after_in_child=self._forget_in_child)
        # what ends a job is reported there, also when this rank writes to a log (run.logs)
        self._console = os.dup(2)
        # the watchdog asks for the stack of a rank that is stuck
        faulthandler.register(signal.SIGUSR2, self._console, all_threads=False)
        try:
            threading.Thread(target=self._attend, name=THREAD, daemon=True).start()
        except RuntimeError:
            self._refuse(found)
        with suppress(OSError, queue.Empty):
            self._share()
            self._be_known(found)

    def _forget_in_child(self) -> None:
        """Let a child that a script forks hear its own signals, and not hide this rank's end."""
        with suppress(OSError, ValueError):
            signal.set_wakeup_fd(-1)
            for name in ASKS:
                if signal.getsignal(name) is _heard_by_the_thread:
                    signal.signal(name, signal.SIG_DFL)
            os.close(self._alive)

    def _refuse(self, known: socket.socket | None) -> None:
        """End a job one of whose ranks can start no thread, as bad input; does not return.

        The watchdog prints the first report.
        """
        report = f"mpitrain: {self.place.who} on {os.uname().nodename}: no thread can be started; {no_more()}"
        try:
            self._share()
            socket.send_fds(known, [messages.GREETING], [self._slot, self._lifeline])
            known.send(messages.FAILED + b"%d " % BAD_INPUT + report.encode())
            while _ready([known.fileno()], VERDICT_S) and known.recv(16).startswith(messages.READY):
                continue
        except (OSError, AttributeError):
            console.write(self._console, report)
        abort(BAD_INPUT)

    # ------------------------------------------------------------ the watchdog of the node

    def _share(self) -> None:
        """Move this rank's place to where a watchdog can see it. Raises OSError."""
        if self._slot is None:
            self._slot, memory = shared_slot()
            self.place.take(memory)

    def _be_known(self, connection: socket.socket | None) -> None:
        """Go on when a watchdog sees what happens to this rank, and no other one does.

        Raises OSError or queue.Empty.
        """
        if connection is None:
            return
        known = self._watchdog
        self._watchdog = connection
        os.write(self._wake, b"\0")  # the thread has another to listen to
        answer, _, pid = self._answer_of(connection, messages.GREETING, self._slot, self._lifeline).partition(
            b" "
        )
        if answer != messages.READY:
            raise ConnectionError("it has ended")
        self._watchdog_pid = int(pid)
        self._part_from(known)

    def _answer_of(self, connection: socket.socket, message: bytes, *given: int) -> bytes:
        """Send a watchdog a message with descriptors, and return what it answers to the thread.

        Raises OSError or queue.Empty.
        """
        self._answers = queue.SimpleQueue()  # that one has ended may be in the other
        socket.send_fds(connection, [message], given)
        return self._answers.get(timeout=READY_S)

    def join(self, world: World) -> None:
        """Have one watchdog for the ranks of this node, which knows those of other nodes.

        Collective over all ranks.
        """
        meeting, door = _meet(world)
        with self.place.waiting("joining the watchdog of this node"):
            known = world.node.allgather(0 if self._watchdog is None else peer_of(self._watchdog).pid)
            self._joined = 0 not in known and len(set(known)) == 1 and self._introduced(world, meeting, door)
            if not self._joined and self._anew(world):
                self._joined = self._introduced(world, meeting, door)
            if not self._joined:
                self._part_from(self._watchdog)
                self._watchdog = None
        self._alone = world.num_nodes == 1
        if self._alone and world.node.rank == 0:
            self._meeting = messages.MEET + b"%d" % world.node.size
        if door is not None:
            door.close()
        os.write(self._wake, b"\0")  # the thread listens to another, or looks no more

    def _introduced(self, world: World, meeting: Meeting, door: socket.socket | None) -> bool:
        """Tell the watchdog which ranks are here.

        Return whether it watches them. Collective over the ranks of this node.
        """
        return world.node.bcast(
            self._introduce(world.node.size, meeting, door) if world.node.rank == 0 else None
        )

    def _introduce(self, num_ranks: int, meeting: Meeting, door: socket.socket | None) -> bool:
        connection = self._watchdog
        if connection is None:
            return False
        try:
            meeting_fd = meeting.written()
        except OSError:
            return False
        try:
            given = self._console, meeting_fd, *([] if door is None else [door.fileno()])
            return self._answer_of(connection, messages.MEET + b"%d" % num_ranks, *given) == messages.READY
        except (OSError, queue.Empty):
            return False
        finally:
            os.close(meeting_fd)

    def _anew(self, world: World) -> bool:
        """Start a watchdog for the ranks of this node; return whether all are connected.

        Collective over these ranks.
        """
        address = world.node.bcast(self._start() if world.node.rank == 0 else None)
        if not address:
            return False
        reached = True
        try:
            self._share()
            self._be_known(watchdog_rendezvous.connect(address))
        except (OSError, queue.Empty) as error:
            console.write(
                self._console,
                f"mpitrain: {self.place.who}: the watchdog of this node can't be reached ({error})",
            )
            reached = False
        return all(world.node.allgather(reached))

    def _start(self) -> str:
        """Start a watchdog and return its address; "" if that can't be."""
        if not sys.platform.startswith("linux"):
            return ""  # it reads /proc
        address = f"\0mpitrain-{os.getpid()}-{time.time_ns():x}"
        try:
            self._share()
            return address if watchdog_rendezvous.start(address) else ""
        except OSError as error:
            unnamed = "a rank that is stopped or killed won't be named"
            console.write(self._console, f"mpitrain: no watchdog on this node ({error}): {unnamed}")
            return ""

    def _part_from(self, known: socket.socket | None) -> None:
        """Have a watchdog forget this rank.

        It closes the connection, which the thread may be listening to.
        """
        if known is not None:
            with suppress(OSError):
                known.send(messages.BYE)

    # ------------------------------------------------------------ the thread

    def _attend(self) -> None:
        """Listen to signals and to the watchdog; until one watches the limit, do so."""
        while True:
            known = self._watchdog
            watched = known is not None and self._joined
            ready = _ready(
                [self._wakes, *([] if known is None else [known.fileno()])], self._patience_s(watched)
            )
            if self._wakes in ready:
                self._signalled(os.read(self._wakes, 512))
            if known is not None and known.fileno() in ready:
                self._hear(known)
            elif not watched:
                self._look()
            self._require_left()
            self._look_at_watchdog(time.monotonic())

    def _hear(self, known: socket.socket) -> None:
        """Take what a watchdog says: an answer, or the code to end the job with."""
        try:
            said = known.recv(16)
        except OSError:
            said = b""
        if not said and self._watchdog is known:
            self._watchdog = None
            if self._joined:
                self._replace_watchdog()
        if said.partition(b" ")[0] in (b"", messages.READY, messages.REFUSED):
            self._answers.put(said)
        else:
            abort(int(said))

    def _replace_watchdog(self) -> None:
        """Have another watchdog in place of one that was killed.

        This rank's thread calls it: it takes the answer itself.

        Where there are several nodes it doesn't know the others: it reports who is gone, and this
        rank watches its own limit.
        """
        self._joined = False
        with suppress(OSError):
            connection = watchdog_rendezvous.of_this_job()
            if connection is None:
                return
            socket.send_fds(connection, [messages.GREETING], [self._slot, self._lifeline])
            answer = connection.recv(16) if _ready([connection.fileno()], READY_S) else b""
            if not answer.startswith(messages.READY):
                connection.close()
                return
            self._watchdog, self._watchdog_pid, self._joined = connection, int(answer.split()[1]), self._alone
            if self._meeting:
                meeting_fd = Meeting(names=(os.uname().nodename,)).written()
                socket.send_fds(connection, [self._meeting], [self._console, meeting_fd])
                os.close(meeting_fd)
                console.write(
                    self._console, "mpitrain: the watchdog of this node was killed: there is another"
                )

    def _look_at_watchdog(self, now: float) -> None:
        """Continue a watchdog that is stopped, and speak for one that doesn't answer.

        Only what two looks have found counts: a scheduler that suspends a job stops one process
        after the other.
        """
        if self._unheard is not None and now > self._unheard[0]:
            self._speak_for_watchdog()
        if self._watchdog is not None and self._watchdog_pid and now >= self._look_at:
            self._look_at = now + WATCHDOG_S
            self._watchdog_seen = self._watchdog_seen + 1 if condition(self._watchdog_pid) == "T" else 0
            if self._watchdog_seen > 1:
                send_signal(self._watchdog_pid, signal.SIGCONT)

    def _speak_for_watchdog(self) -> None:
        """Print what the watchdog was to print, and end the job.

        The launcher waits for the watchdog, which therefore is killed.
        """
        _, report, code = self._unheard
        if self._watchdog is not None and self._watchdog_pid:
            send_signal(self._watchdog_pid, signal.SIGKILL)
        console.write(self._console, report)
        abort(code)

    def _signalled(self, numbers: bytes) -> None:
        """Count a request to leave.

        Steps end with a checkpoint first (training/early_exit.py); a second request, where there is
        nothing to save, a second Ctrl-C, and a third request anywhere, end the job at once.
        """
        now = time.monotonic()
        asked = [number for number in numbers if number in ASKS]
        if not asked:
            return
        counts = now - self._asked_at > (ECHO_S if launched() else KEY_S)
        if counts:
            self.num_asked = self.num_asked + 1
            self._asked_at = now
            self.asked_by = signal.Signals(asked[0]).name
        again = counts and self.num_asked > 1
        at_once = self.num_asked > 2 or (again and (signal.SIGINT in asked or self._saves_nothing()))
        self._say_asked(asked[0], "" if at_once or self._saves_nothing() else SAVES_FIRST)
        if not self._joined and signal.SIGTERM in numbers:
            time.sleep(TERM_S)
        if at_once:
            self._leave_now()

    # -------------------------------------- the end of its time, and where there is nothing to save

    def watch(self, time: Allotted | None) -> None:
        """Have this rank leave before its time is over."""
        self.time = time
        os.write(self._wake, b"\0")

    def begin_steps(self) -> None:
        """Have steps leave by themselves from now on, with a checkpoint.

        Until then there is nothing to save in any phase.
        """
        self._unsaved = BEFORE_STEPS

    def why_leave(self) -> str:
        """Return why this rank has to leave, in words; "" if it hasn't."""
        if self.num_asked:
            return "it was asked to leave"
        return (
            f"its time is nearly over, {self.time.end.distance()}" if self.time and self.time.is_over else ""
        )

    def leave_if_asked(self, world: World, *kept: str) -> None:
        """Raise StoppedEarly on all ranks if one of them has to leave.

        kept: see there.

        It is collective over all ranks.
        """
        phase = self.place.phase
        if why := world.first_of("whether to leave", self.why_leave()):
            raise _of_all(StoppedEarly(phase, why, *kept))

    def _saves_nothing(self) -> bool:
        return self.place.read().phase in self._unsaved

    def _patience_s(self, watched: bool) -> float:
        """Return for how long the thread may sleep. poll() doesn't count while a machine sleeps,
        the time of a job does.
        """
        if not watched or self._unheard is not None:
            return LOOK_S
        if self._leave_by < float("inf"):
            return max(0.0, min(WATCHDOG_S, self._leave_by - time.monotonic()))
        if self.time is None:
            return LOOK_S if self.num_asked else WATCHDOG_S
        return min(WATCHDOG_S, max(LOOK_S, self.time.end.left_s - self.time.margin_s))

    def _require_left(self) -> None:
        """End the job if it should have left, has nothing to save, and the ranks don't leave together.

        One of them is in something long.
        """
        if not (self._saves_nothing() and self.why_leave()):
            self._leave_by = float("inf")
        elif self._leave_by == float("inf"):
            patience_s = IN_ORDER_S if self.num_asked else min(IN_ORDER_S, self.time.margin_s / 2)
            self._leave_by = time.monotonic() + patience_s
        elif time.monotonic() >= self._leave_by and self._unheard is None:
            self._leave_now()

    def _leave_now(self) -> None:
        where = self.place.read()
        why = " was asked to leave" if self.num_asked else f" is out of time, {self.time.end.distance()},"
        self._end(
            f"mpitrain: {where.describe(why)}; checkpoints are intact; run the same command to resume",
            STOPPED_EARLY,
        )

    # ------------------------------------------------------------ waits that take too long

    def _look(self) -> None:
        where = self.place.read()
        for_s = self._activity.idle_s(where, time.monotonic())
        if for_s > where.limit_s + STAGGER_S * (self.place.rank.bit_length() + (where.state == WAITING)):
            how = f"waits for other ranks{_absent()}" if where.state == WAITING else "is stuck"
            report = (
                f"mpitrain: {where.describe('')}: {how}, for {for_s:.0f} s; the limit is {where.limit_s:g} s "
                "(comm.timeout_s)"
            )
            self._end(report, FAILED)

    def _say_asked(self, number: int, what: str) -> None:
        """Have the watchdog know that this rank was asked to leave, and say what it does.

        what: "": nothing is said.
        """
        if self._watchdog is not None:
            text = what and f"mpitrain: asked to leave ({signal.Signals(number).name}): {what}"
            with suppress(OSError):
                self._watchdog.send(messages.ASKED + b"%d " % number + text.encode())

    # ------------------------------------------------------------ how a rank ends

    def leave(self, code: int) -> None:
        """End in good order, with this exit code. Collective over all ranks.

        Open MPI's launcher, asked to end, kills ranks in MPI_Finalize and drops what they have
        said: the watchdog says it before.
        """
        self.place.enter("end", "in MPI_Finalize", WAITING)
        if self.num_asked and code == STOPPED_EARLY and self.place.saved != NOT_KNOWN:
            self._say_left()
        above = launcher_above()
        above.go_on()  # Open MPI's takes part in MPI_Finalize
        above.close()
        if self._watchdog is not None and self._watchdog_pid and condition(self._watchdog_pid) == "T":
            send_signal(self._watchdog_pid, signal.SIGCONT)
        finalize()
        self.place.enter("end", "leaving", LEFT)
        for name in ASKS:  # srun ends those that are left when the first leaves with 75
            # and Python forgets handlers on its way out, this not
            signal.signal(name, signal.SIG_IGN)

    def _say_left(self) -> None:
        flush()
        time.sleep(FORWARD_S)
        text = with_saved(f"mpitrain: asked to leave ({self.asked_by})", self.place.saved)
        if self._watchdog is not None:
            with suppress(OSError):
                self._watchdog.send(messages.LEAVES + b"0 " + text.encode())

    def answer(self, error: BaseException, report: Callable[[MpitrainError], None]) -> int:
        """Return the exit code of an error that all ranks have, when `report` has shown it on the first.

        Any other ends the whole job.
        """
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
                self._end(f"mpitrain: {where}: {error.args[0]}", FAILED, messages.GAVE_UP)
            elif isinstance(error, KeyboardInterrupt):
                self._end(f"mpitrain: {where.describe(' was interrupted')}", FAILED)
            else:
                early = where.phase in BEFORE_STEPS and isinstance(error, MpitrainError)
                self._end(
                    f"{_traceback(error)}mpitrain: {where.describe(' failed')}: {_cause(error)}",
                    error.exit_code if early else FAILED,
                )
            if self._unheard is not None:
                # meanwhile the thread hears the watchdog, or speaks for it
                time.sleep(VERDICT_S + 2 * LOOK_S)
        finally:
            abort(FAILED)

    def end(self, cause: str) -> None:
        """Report trouble that a thread of this rank has found, and end the job."""
        self._end(f"mpitrain: {self.place.read().describe(' failed')}: {cause}", FAILED)

    def _end(self, report: str, code: int, kind: bytes = messages.FAILED) -> None:
        """Have the report printed and the job ended, by the watchdog, which prints the first one
        only, or here.
        """
        flush()
        here = with_saved(report, NOT_KNOWN if code == BAD_INPUT else self.place.saved)
        try:
            if self._watchdog is not None:
                self._watchdog.send(kind + b"%d " % code + report.encode(errors="replace")[-MOST_TEXT:])
                send_signal(self._watchdog_pid or os.getpid(), signal.SIGCONT)
                self._unheard = time.monotonic() + VERDICT_S, here, code
                os.write(self._wake, b"\0")
                return
        except OSError:
            self._watchdog = None  # it is gone
        console.write(self._console, here)
        abort(code)


def _ready(descriptors: list[int], timeout_s: float | None) -> set[int]:
    """Wait until there is something to read, or an end; return where.

    It isn't done by select(), which takes no number above 1023.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


def _found() -> socket.socket | None:
    """Return a connection to the watchdog that this launcher's ranks on this node have from their
    first line, if they can.
    """
    with suppress(OSError):
        return watchdog_rendezvous.of_this_job()
    return None


def _meet(world: World) -> tuple[Meeting, socket.socket | None]:
    """Return how this node's watchdog finds those of the others, and the door of the first node's, on rank 0.

    Collective.
    """
    if world.num_nodes == 1:
        return Meeting(names=(os.uname().nodename,)), None
    door, offer = None, None
    if world.rank == 0:
        door = socket.create_server(("", 0), backlog=world.num_nodes)
        offer = addresses_here(), door.getsockname()[1], os.urandom(16).hex()
    every = world.all_gather(
        "meeting the watchdogs of other nodes", (offer, os.uname().nodename, world.node.rank == 0)
    )
    names = [name for _, name, first in every if first]
    # right on the first rank of each node, which is asked
    node = sum(first for _, _, first in every[: world.rank + 1]) - 1
    return Meeting(node, unique_names(names), *every[0][0]), door


def guarded(body: Callable[[Guard], int], report: Callable[[MpitrainError], None]) -> int:
    """Run body(guard) and return the exit code.

    `report` shows an error that all ranks have, on the first of them. Collective.
    """
    guard = Guard()
    try:
        code = body(guard)
    except BaseException as error:
        code = guard.answer(error, report)
    guard.leave(code)
    return code


def _of_all(error: StoppedEarly) -> StoppedEarly:
    error.everywhere = True
    return error


def is_guarded() -> bool:
    """Return whether this process has a guard, or had one: MPI starts once in a process."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def _heard_by_the_thread(*signal_and_frame: object) -> None:
    """Do nothing: without a handler a signal would end the process, and no thread would hear of it."""


def _cause(error: BaseException) -> str:
    return str(error) if isinstance(error, MpitrainError) else f"{type(error).__name__}: {error}".rstrip(": ")


def _absent() -> str:
    """Name the ranks of this node that don't wait in MPI_Init, for one that does."""
    found = sorted(elsewhere(STARTING).items())
    missing = [
        f"rank {rank} has not come: {condition_of(pid, 'it does something else')}" for rank, pid in found
    ]
    return f" ({'; '.join(missing[:MOST_NAMED])})" if missing else ""


def _traceback(error: BaseException) -> str:
    """Return where an error came from, if it is one that nobody expected."""
    expected = isinstance(error, MpitrainError) or not isinstance(error, Exception)
    return "" if expected else "".join(traceback.format_exception(error))
