"""A rank's end of its connection to the watchdog of its node: greeting it, being watched, reporting.

A rank continues a watchdog that is stopped, has another in place of one that was killed, and prints
a report itself that the watchdog doesn't.
"""

import os
import queue
import select
import signal
import socket
import sys
import time
from contextlib import suppress

from mpitrain.cluster import console, watchdog_rendezvous
from mpitrain.cluster import watchdog_messages as messages
from mpitrain.cluster.nodes import Meeting, addresses_here, unique_names
from mpitrain.cluster.processes import condition, no_more, peer_of, send_signal
from mpitrain.cluster.status_board import NOT_KNOWN, RankStatus, shared_slot, with_saved
from mpitrain.comm.base.world import World, abort, flush
from mpitrain.errors import BAD_INPUT

READY_S = 20.0  # for a process to start, on a node where all ranks do
VERDICT_S = 15.0  # for the watchdog to report and end the job; then a rank does it itself
# between two looks whether the watchdog is stopped, which of two looks have to find
WATCHDOG_S = 2.0
MOST_TEXT = 60_000  # bytes of a report: one message to the watchdog


class WatchdogClient:
    """connection: None where there is no watchdog.

    joined: whether it knows the ranks of this node.
    undelivered: a report that it was given, with the exit code, and when to print it here.
    """

    def __init__(self, place: RankStatus):
        self._place = place
        # Before this rank opens anything else: a process that ends closes its descriptors in their
        # order, and the watchdog is to learn of it before the launcher, which ends the others in
        # no time. Its own socket is no. 9 under MPICH.
        self._lifeline, self._alive = os.pipe()
        self._first: socket.socket | None = None  # to this launcher's watchdog here, if there can be one
        with suppress(OSError):
            self._first = watchdog_rendezvous.connect_to_job()
        self.connection: socket.socket | None = None
        self.joined = self._alone = False  # alone: there is no other node
        self.undelivered: tuple[float, str, int] | None = None
        self._slot: int | None = None
        self._pid = self._times_stopped = 0  # its process; how many looks in a row have found it stopped
        self._look_at = 0.0  # when to look at it
        self._has_spares = False
        self._meeting: bytes | None = None  # what the first rank of a node tells another watchdog
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.wakes, self._wake = os.pipe()  # for this rank's thread, which listens
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)  # while MPI runs, too
        # what ends a job is reported there, also when this rank writes to a log (run.logs)
        self.console = os.dup(2)

    def begin(self) -> None:
        """Be watched, where there is a watchdog."""
        with suppress(OSError, queue.Empty):
            self._share_slot()
            self._greet(self._first)

    def close_lifeline(self) -> None:
        """Let a forked child not hide this rank's end."""
        os.close(self._alive)

    def wake(self) -> None:
        """Have the thread look at everything anew."""
        os.write(self._wake, b"\0")

    def proceed(self) -> None:
        """Continue a watchdog that is stopped."""
        if self.connection is not None and self._pid and condition(self._pid) == "T":
            send_signal(self._pid, signal.SIGCONT)

    def refuse(self) -> None:
        """End a job one of whose ranks can start no thread, as bad input; does not return.

        The watchdog prints the first report.
        """
        report = (
            f"mpitrain: {self._place.who} on {os.uname().nodename}: no thread can be started; {no_more()}"
        )
        connection = self._first
        try:
            self._share_slot()
            socket.send_fds(connection, [messages.GREETING], [self._slot, self._lifeline])
            connection.send(messages.FAILED + b"%d " % BAD_INPUT + report.encode())
            while ready([connection.fileno()], VERDICT_S) and connection.recv(16).startswith(messages.READY):
                continue
        except (OSError, AttributeError):
            console.write(self.console, report)
        abort(BAD_INPUT)

    def _share_slot(self) -> None:
        """Move this rank's place to where a watchdog can see it. Raises OSError."""
        if self._slot is None:
            self._slot, memory = shared_slot()
            self._place.take(memory)

    def _greet(self, connection: socket.socket | None) -> None:
        """Have this watchdog, and no other, see this rank. Raises OSError or queue.Empty."""
        if connection is None:
            return
        known = self.connection
        self.connection = connection
        self.wake()  # the thread has another to listen to
        said = self._answer_of(connection, messages.GREETING, self._slot, self._lifeline)
        answer, _, pid = said.partition(b" ")
        if answer != messages.READY:
            raise ConnectionError("it has ended")
        self._pid = int(pid)
        self._leave(known)

    def _answer_of(self, connection: socket.socket, message: bytes, *given: int) -> bytes:
        """Return what a watchdog answers to the thread. Raises OSError or queue.Empty."""
        self._answers = queue.SimpleQueue()  # that one has ended may be in the other
        socket.send_fds(connection, [message], given)
        return self._answers.get(timeout=READY_S)

    def join(self, world: World) -> None:
        """Have one watchdog for the ranks of this node, which knows those of other nodes.

        Collective over all ranks.
        """
        meeting, door = _meeting_of(world)
        with self._place.waiting("joining the watchdog of this node"):
            known = world.node.allgather(0 if self.connection is None else peer_of(self.connection).pid)
            self.joined = (
                0 not in known and len(set(known)) == 1 and self._introduce_ranks(world, meeting, door)
            )
            if not self.joined and self._start_for_node(world):
                self.joined = self._introduce_ranks(world, meeting, door)
            if not self.joined:
                self._leave(self.connection)
                self.connection = None
        self._alone = world.num_nodes == 1
        if self._alone and world.node.rank == 0:
            self._meeting = messages.MEET + b"%d" % world.node.size
        if door is not None:
            door.close()
        self.wake()  # the thread listens to another, or looks no more

    def _introduce_ranks(self, world: World, meeting: Meeting, door: socket.socket | None) -> bool:
        """Return whether the watchdog watches the ranks of this node. Collective over them."""
        first = world.node.rank == 0
        return world.node.bcast(self._introduce(world.node.size, meeting, door) if first else None)

    def _introduce(self, num_ranks: int, meeting: Meeting, door: socket.socket | None) -> bool:
        connection = self.connection
        if connection is None:
            return False
        with suppress(OSError, queue.Empty):
            meeting_fd = meeting.written()
            try:
                given = self.console, meeting_fd, *([] if door is None else [door.fileno()])
                answer = self._answer_of(connection, messages.MEET + b"%d" % num_ranks, *given)
            finally:
                os.close(meeting_fd)
            return answer == messages.READY
        return False

    def _start_for_node(self, world: World) -> bool:
        """Return whether all ranks of this node are connected to another. Collective over them."""
        address = world.node.bcast(self._start() if world.node.rank == 0 else None)
        if not address:
            return False
        reached = True
        try:
            self._share_slot()
            self._greet(watchdog_rendezvous.connect(address))
        except (OSError, queue.Empty) as error:
            console.write(
                self.console,
                f"mpitrain: {self._place.who}: the watchdog of this node can't be reached ({error})",
            )
            reached = False
        return all(world.node.allgather(reached))

    def _start(self) -> str:
        """Start a watchdog and return its address; "" if that can't be."""
        if not sys.platform.startswith("linux"):
            return ""  # it reads /proc
        address = f"\0mpitrain-{os.getpid()}-{time.time_ns():x}"
        try:
            self._share_slot()
            return address if watchdog_rendezvous.start(address) else ""
        except OSError as error:
            unnamed = "a rank that is stopped or killed won't be named"
            console.write(self.console, f"mpitrain: no watchdog on this node ({error}): {unnamed}")
            return ""

    def expect_spares(self) -> None:
        """Have the watchdog not end the job for a rank that is gone: the others repair it."""
        self._has_spares = True
        with suppress(OSError):
            self.tell(messages.SPARES, 0, "")

    def _leave(self, known: socket.socket | None) -> None:
        """Have a watchdog forget this rank: it closes the connection, which a thread may hear."""
        if known is not None:
            with suppress(OSError):
                known.send(messages.BYE)

    def hear(self, known: socket.socket) -> None:
        """Take what a watchdog says: an answer, or the code to end the job with."""
        try:
            said = known.recv(16)
        except OSError:
            said = b""
        if not said and self.connection is known:
            self.connection = None
            if self.joined:
                self._replace()
        if said.partition(b" ")[0] in (b"", messages.READY, messages.REFUSED):
            self._answers.put(said)
        else:
            abort(int(said))

    def _replace(self) -> None:
        """Have another watchdog in place of one that was killed. Called by the thread.

        It doesn't know other nodes: with several it reports who is gone; ranks watch their limits.
        """
        self.joined = False
        with suppress(OSError):
            connection = watchdog_rendezvous.connect_to_job()
            if connection is None:
                return
            socket.send_fds(connection, [messages.GREETING], [self._slot, self._lifeline])
            answer = connection.recv(16) if ready([connection.fileno()], READY_S) else b""
            if not answer.startswith(messages.READY):
                connection.close()
                return
            self.connection, self._pid, self.joined = connection, int(answer.split()[1]), self._alone
            if self._has_spares:
                self.expect_spares()
            if self._meeting:
                meeting_fd = Meeting(names=(os.uname().nodename,)).written()
                socket.send_fds(connection, [self._meeting], [self.console, meeting_fd])
                os.close(meeting_fd)
                console.write(
                    self.console, "mpitrain: the watchdog of this node was killed: there is another"
                )

    def look_at(self, now: float) -> None:
        """Continue a watchdog that is stopped, and speak for one that doesn't answer.

        Only what two looks have found counts: a scheduler that suspends a job stops one process
        after the other.
        """
        if self.undelivered is not None and now > self.undelivered[0]:
            self._speak_for()
        if self.connection is not None and self._pid and now >= self._look_at:
            self._look_at = now + WATCHDOG_S
            self._times_stopped = self._times_stopped + 1 if condition(self._pid) == "T" else 0
            if self._times_stopped > 1:
                send_signal(self._pid, signal.SIGCONT)

    def _speak_for(self) -> None:
        """Print what the watchdog was to print, kill it (the launcher waits), and end the job."""
        _, report, code = self.undelivered
        if self.connection is not None and self._pid:
            send_signal(self._pid, signal.SIGKILL)
        console.write(self.console, report)
        abort(code)

    def tell(self, kind: bytes, code: int, text: str) -> None:
        """Send the watchdog a message. Raises OSError where there is none."""
        if self.connection is None:
            raise ConnectionError("there is no watchdog")
        self.connection.send(kind + b"%d " % code + text.encode(errors="replace")[-MOST_TEXT:])

    def end_job(self, report: str, code: int, kind: bytes = messages.FAILED) -> None:
        """Have the watchdog report and end the job (the first report counts), or do it here."""
        flush()
        here = with_saved(report, NOT_KNOWN if code == BAD_INPUT else self._place.saved)
        try:
            self.tell(kind, code, report)
        except OSError:
            self.connection = None  # it is gone
            console.write(self.console, here)
            abort(code)
            return
        send_signal(self._pid or os.getpid(), signal.SIGCONT)
        self.undelivered = time.monotonic() + VERDICT_S, here, code
        self.wake()


def ready(descriptors: list[int], timeout_s: float | None) -> set[int]:
    """Wait until there is something to read, or an end; return where."""
    poll = select.poll()  # select() takes no number above 1023
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if timeout_s is None else 1000 * timeout_s)}


def _meeting_of(world: World) -> tuple[Meeting, socket.socket | None]:
    """Return how watchdogs find one another, and on rank 0 the door of its own. Collective."""
    if world.num_nodes == 1:
        return Meeting(names=(os.uname().nodename,)), None
    door, offer = None, None
    if world.rank == 0:
        door = socket.create_server(("", 0), backlog=world.num_nodes)
        offer = addresses_here(), door.getsockname()[1], os.urandom(16).hex()
    offers = world.all_gather(
        "meeting the watchdogs of other nodes", (offer, os.uname().nodename, world.node.rank == 0)
    )
    names = [name for _, name, first in offers if first]
    # right on the first rank of each node, which is asked
    node = sum(first for _, _, first in offers[: world.rank + 1]) - 1
    return Meeting(node, unique_names(names), *offers[0][0]), door
