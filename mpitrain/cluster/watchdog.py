"""The watchdog of a node: one small process that knows where every rank is, and speaks and acts for those that can't.

    what it reports                how it knows
    a rank failed                  the rank sends its report before it ends
    a rank gave up a wait          the same; a moment later all have, and of where all ranks of the job are follows who is behind
    a rank is stuck                its place is the same for its limit, and it neither computes nor reads nor writes
    a rank is gone                 its socket closed before it said that it leaves

The first trouble is reported, once; what follows from it isn't. Where ranks wait, the watchdog of the first node asks those of the others
(nodes.py), and says who is behind (behind.py), unless a rank of any node is still at work. Then the job is ended: a rank is asked to (by
MPI_Abort, with the exit code), a moment later all are, and what is left is killed. A stopped process can do nothing of this itself, and
neither can one that was killed, crashed, or is held in a system call: so this is a process of its own.

Standard library only. Started by guard.py.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from mpitrain.cluster.behind import Rank, Report, at_fault, report
from mpitrain.cluster.board import ABSENT, BUSY, LEFT, SLOT, WAITING, WORKING, Where, read_slot
from mpitrain.cluster.nodes import Meeting, Nodes
from mpitrain.cluster.outlet import Outlet
from mpitrain.cluster.processes import CONDITIONS, DEAF, condition, held_in, peer_of, send_signal, used

LOOK_S = 0.25
GATHER_S = 2.0  # waits end at almost the same moment; time for the last rank to say so, and what for
FORWARD_S = 0.5  # launchers drop what they have not yet forwarded when a job is aborted: the reason would be lost
END_S = (1.5, 4.0)  # after the first rank is asked to end the job: until all are, until they are killed
ASK_S = 3.0  # for the watchdogs of other nodes to answer
AGAIN_S = 5.0  # after which they are asked again, where ranks waited for one that was at work
ELSEWHERE_S = 3.0  # and for the first node's to report, before one that has told it of trouble reports for itself
CONNECT_S = 60.0
STEPPING = ("step", "validation")
STEP_GRACE_S = 3.0  # in a step the ranks that wait speak first: they know for what
AT_WORK = (WORKING, BUSY, LEFT)
SHARE = 0.05  # of a core, that tells work from waiting: there may be many more ranks than cores

FAILED, GAVE_UP = b"F", b"W"  # what a rank sends, with its text; a greeting is the number of its slot
READY = b"ready"  # the answer to a greeting; what else a rank is sent is the exit code to end the job with


@dataclass
class Activity:
    """Whether a rank does anything where it is. worked: when it was last seen to; used: of the machine, by the last look."""

    worked: float = 0.0
    looked: float = 0.0
    used: tuple[int, float] = (0, 0.0)

    def idle_s(self, where: Where, now: float) -> float:
        """Return for how long the rank is where it is; while it is BUSY, for how long it has done nothing."""
        if where.phase in STEPPING:
            return now - where.since - STEP_GRACE_S
        if where.state not in (BUSY, LEFT):
            return now - where.since
        if now - self.looked > 1:
            found = used(where.pid)
            if found[0] > self.used[0] or found[1] - self.used[1] > SHARE * (now - self.looked):
                self.worked = now
            self.looked, self.used = now, found
        return now - max(where.since, self.worked)


@dataclass
class Seen:
    """A rank as the watchdog knows it."""

    slot: int
    connection: socket.socket
    activity: Activity = field(default_factory=Activity)


@dataclass
class Watchdog:
    """listener: where ranks connect.  board: one slot for each of `num_ranks`.  nodes: the links to watchdogs of other nodes.

    alone_at_first: there is no first watch (first_watch.py), which else answers for the ranks until all of them have come.
    """

    listener: socket.socket
    board: memoryview
    num_ranks: int
    nodes: Nodes
    alone_at_first: bool = True
    outlet: Outlet = field(default_factory=Outlet)
    seen: dict[int, Seen] = field(default_factory=dict)  # by file descriptor, of ranks that are connected
    gave_up: dict[int, str] = field(default_factory=dict)  # by slot
    suspects: set[tuple[int, float]] = field(default_factory=set)  # of the last look: rank, since when
    boards: dict[int, list[Rank]] = field(default_factory=dict)  # by node, what others have answered
    ask_at: float = float("inf")  # when the ranks here will have said for what they wait
    report_at: float = float("inf")  # when answers are waited for no more
    again_at: float = 0.0  # before which nobody is blamed for waiting
    ended_at: float = float("inf")
    code: int = 1
    asked: int = 0  # how far the end has come

    def run(self) -> None:
        """Watch until no rank is left."""
        self._poll = select.epoll()  # gives what happened in its order: a launcher kills all ranks milliseconds after the first has died
        doors = {each.fileno(): each for each in (self.listener, self.nodes.listener) if each is not None}
        for descriptor in (*doors, *self.nodes.links):
            self._poll.register(descriptor, select.EPOLLIN)
        begin, self._came = time.monotonic(), 0
        while self.seen or (self._came < self.num_ranks and time.monotonic() - begin < CONNECT_S):
            for descriptor, _ in self._poll.poll(LOOK_S):
                if descriptor in doors:
                    self._open(doors[descriptor])
                elif descriptor in self.nodes.links:
                    self._hear_node(descriptor)
                elif not self._hear(self.seen[descriptor]):
                    self._poll.unregister(descriptor)
                    self.seen.pop(descriptor).connection.close()
            self._act(time.monotonic())

    def _open(self, door: socket.socket) -> None:
        """Let a rank of this node in, or the watchdog of another."""
        if door is self.nodes.listener:
            descriptor = self.nodes.accept()
        else:
            connection, _ = self.listener.accept()
            if peer_of(connection).uid != os.getuid():
                return connection.close()
            descriptor = connection.fileno()
            self.seen[descriptor] = Seen(-1, connection)
        self._poll.register(descriptor, select.EPOLLIN)

    def _act(self, now: float) -> None:
        if self.ended_at < now:
            self._go_on_ending(now)
        elif now >= self.report_at:
            self._report()
        elif now >= self.ask_at:
            self._ask_around()
        else:
            self._look(now)

    # ------------------------------------------------------------ what ranks say

    def _hear(self, rank: Seen) -> bool:
        """Take one message of a rank; return False if it is gone."""
        try:
            message = rank.connection.recv(1 << 20)
        except OSError:
            message = b""
        if not message:
            where = self._where(rank) if rank.slot >= 0 else None
            known = where is not None and (self.alone_at_first or self._came == self.num_ranks)
            if known and where.state not in (ABSENT, LEFT) and rank.slot not in self.gave_up:
                self._end(Report(f"mpitrain: {where}: the process is gone: killed, out of memory, or crashed in native code"))
            return False
        kind, (code, _, text) = message[:1], message[1:].decode(errors="replace").partition(" ")
        if kind == FAILED:
            self._end(Report(text), int(code), first=rank)
        elif kind == GAVE_UP:
            self.gave_up[rank.slot] = text
            self.ask_at = min(self.ask_at, time.monotonic() + GATHER_S)
        else:
            rank.slot, self._came = int(message), self._came + 1
            rank.connection.send(READY)
        return True

    @property
    def _ranks(self) -> list[Seen]:
        """The ranks that have said who they are."""
        return sorted((rank for rank in self.seen.values() if rank.slot >= 0), key=lambda rank: rank.slot)

    def _where(self, rank: Seen) -> Where:
        return read_slot(self.board[rank.slot * SLOT : (rank.slot + 1) * SLOT])

    # ------------------------------------------------------------ what the watchdog sees

    def _look(self, now: float) -> None:
        """Ask around about a rank whose limit is over; ranks that wait are at fault only if none here works."""
        ranks = [(rank, self._where(rank)) for rank in self._ranks]
        late = [where for rank, where in ranks if where.state in AT_WORK and self._late(rank, where, now)]
        grace_s = GATHER_S if self.nodes.alone else GATHER_S + ELSEWHERE_S
        waiting = [where for _, where in ranks if where.state == WAITING and now > self.again_at]
        over = [where for where in waiting if now - where.since > where.limit_s + grace_s]
        before, self.suspects = self.suspects, {(where.rank, where.since) for where in late + over}
        if before & self.suspects and (late or not any(where.state in AT_WORK for _, where in ranks)):
            self._ask_around()  # for one look nobody is suspected: this process, or all of the machine, may have stood still

    def _late(self, rank: Seen, where: Where, now: float) -> bool:
        return rank.activity.idle_s(where, now) > where.limit_s

    def _board(self) -> list[Rank]:
        """Return where the ranks of this node are, and in which condition."""
        now, found = time.monotonic(), []
        for rank in self._ranks:
            where = self._where(rank)
            late = where.state in AT_WORK and self._late(rank, where, now)
            gave_up, for_s = self.gave_up.get(rank.slot, ""), now - where.since
            if not gave_up and where.state == WAITING and for_s > where.limit_s:
                gave_up = f"mpitrain: {where}: waits for {for_s:.0f} s"
            found.append(Rank(where, self.nodes.name, condition(where.pid), held_in(where.pid), for_s, gave_up, late))
        return found

    # ------------------------------------------------------------ with the watchdogs of other nodes

    def _ask_around(self) -> None:
        """Have it reported who is behind: by the first node's watchdog, which asks the others where their ranks are."""
        self.ask_at, now = float("inf"), time.monotonic()
        if self.report_at < float("inf"):
            return
        if self.nodes.alone or (not self.nodes.is_hub and not self.nodes.links):
            self._report()
            return
        self.nodes.tell({"say": "where" if self.nodes.is_hub else "trouble"})
        self.report_at = now + ASK_S + (0.0 if self.nodes.is_hub else ELSEWHERE_S)

    def _hear_node(self, descriptor: int) -> None:
        heard = self.nodes.hear(descriptor)
        if heard is None:
            return  # closed, and so forgotten by the poll
        for node, message in heard:
            self._take(node, message)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        """Do as another watchdog says."""
        said = message["say"]
        if said == "trouble":
            self._ask_around()
        elif said == "where":
            self.report_at = min(self.report_at, time.monotonic() + ASK_S + ELSEWHERE_S)
            self.nodes.tell({"say": "board", "ranks": [rank.to_json() for rank in self._board()]})
        elif said == "board":
            self.boards[node] = [Rank.from_json(rank) for rank in message["ranks"]]
            if len(self.boards) == len(self.nodes.meeting.names) - 1 and self.report_at < float("inf"):
                self._report()
        elif said == "go on":
            self._forget()
        elif said == "over" and self.ended_at == float("inf"):
            self._show_stacks(message["behind"])
            self.ended_at, self.code = time.monotonic(), message["code"]
            if self.nodes.is_hub:
                self.nodes.tell(message, but=node)

    def _report(self) -> None:
        names = self.nodes.meeting.names
        known = {self.nodes.meeting.node, *self.boards}
        silent = [name for number, name in enumerate(names) if number not in known] if self.nodes.is_hub else names[:1]
        every = [*self._board(), *(rank for board in self.boards.values() for rank in board)]
        if silent or self.gave_up or at_fault(every):
            self._end(report(every, [] if self.nodes.alone else silent))
        else:
            self.nodes.tell({"say": "go on"})
            self._forget()

    def _forget(self) -> None:
        """Go on: those that wait, wait for ranks of another node, which are at work."""
        self.report_at, self.again_at = float("inf"), time.monotonic() + AGAIN_S
        self.boards.clear()
        self.suspects.clear()

    # ------------------------------------------------------------ the end

    def _end(self, found: Report, code: int = 1, first: Seen | None = None) -> None:
        """Print the report, and begin to end the job. Only the first trouble gets here."""
        if self.ended_at < float("inf"):
            return
        self.outlet.write(found.text)
        self.nodes.tell({"say": "over", "code": code, "behind": found.behind})
        time.sleep(FORWARD_S)  # launchers forward what they have read of each process, be it half a line: one after the other
        self._show_stacks(found.behind)
        if found.behind:
            time.sleep(FORWARD_S)
        self.ended_at, self.code = time.monotonic(), code
        able = [rank for rank in self._ranks if condition(self._where(rank).pid) not in DEAF]
        if code != 1:
            self._ask(able)  # each with the code: Open MPI may tell that of a rank that it has killed
        elif able:
            self._ask([first] if first in able else able[:1])
        if not able:
            self._kill()

    def _show_stacks(self, behind: Iterable[int]) -> None:
        """Have ranks of this node print their stacks (guard.py), those that can."""
        for rank in self._ranks:
            where = self._where(rank)
            if where.rank in behind and condition(where.pid) not in CONDITIONS:
                send_signal(where.pid, signal.SIGUSR2)

    def _go_on_ending(self, now: float) -> None:
        if self.asked == 0 and now - self.ended_at > END_S[0]:
            self._ask(self._ranks)
            self.asked = 1
        elif self.asked == 1 and now - self.ended_at > END_S[1]:
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            send_signal(self._where(rank).pid, signal.SIGKILL)
        self.asked = 2

    def _ask(self, ranks: Iterable[Seen]) -> None:
        for rank in ranks:
            try:
                rank.connection.send(b"%d" % self.code)
            except OSError:
                continue  # gone already


def main() -> None:
    """Watch. The arguments are those of Guard._start: numbers, and the file descriptors of listener, board, meeting, and the hub's door."""
    num_ranks, alone_at_first, listener, board, meeting, *door = map(int, sys.argv[1:])
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # a scheduler sends them to every process; this one ends with its ranks
    memory = memoryview(mmap(board, num_ranks * SLOT))
    nodes = Nodes(Meeting.read(meeting), socket.socket(fileno=door[0]) if door else None)
    nodes.connect()
    Watchdog(socket.socket(fileno=listener), memory, num_ranks, nodes, bool(alone_at_first)).run()
