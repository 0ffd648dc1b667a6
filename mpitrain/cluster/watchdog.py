"""The watchdog of a node: one small process that knows where every rank is, and speaks and acts for
those that can't.

    what it reports        how it knows
    a rank failed          the rank sends its report before it ends
    a rank gave up a wait  the same; a moment later all have, and of where all ranks of the job are
                           follows who is behind
    a rank is stuck        its place is the same for its limit, and it neither computes nor reads
                           nor writes
    a rank is gone         its lifeline closed before it said that it leaves
    the launcher is gone   its process has ended, and ranks haven't (launcher_process.py)

Its phases (WatchdogPhase), each with one deadline:

    GATHERING   ranks of this node connect      all have: WATCHING.  One is gone: DOUBTING
    DOUBTING    does another one live?          after APART_S, if one does: ENDING
    WATCHING    limits, lifelines, messages     a wait is too long: ASKING
    ASKING      where are other nodes' ranks?   somebody is at work: WATCHING.  Nobody is: ENDING
    ENDING      a rank was asked to end the job END_S[0] later: ENDING_ALL
    ENDING_ALL  all of them were                END_S[1] later: KILLED
    KILLED      those that were left were

A rank that failed or is gone leads from GATHERING, WATCHING and ASKING to ENDING at once. With
spare ranks (recovery.spares) one that is gone leads to WATCHING: those that live repair the job,
and their waits for it (phase repair) have the limit of any wait.

A lifeline is a pipe of which a rank holds the writing end (watchdog_connections.py). A launcher
kills all ranks milliseconds after the first has died: lifelines close once each, and so tell which
was the first, even to a watchdog that gets no processor meanwhile. A rank that ends closes what the
launcher reads before its lifeline, and may get no processor in between: how ranks have ended tells,
then.

Only the first trouble is reported. Where ranks wait, the watchdog of the first node asks those of
the others (nodes.py), and says who is behind (hang_analysis.py), unless a rank of any node is at
work. To end the job, a rank is asked to (MPI_Abort, with the exit code), a moment later all are,
and what is left is killed. It is a process of its own, as a stopped, killed or crashed rank can do
nothing of this. Stopped itself, it holds what the launcher waits for: a rank continues it
(guard.py), and so does the system when the rank that started it ends.

It starts with the first line of the first rank of its node (watchdog_rendezvous.py). Which ranks
are to come, and where the watchdogs of other nodes are, it learns when MPI has started; until then
each rank watches its own limit, and it reports those that fail or are gone.

Standard library only.
"""

import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Iterable
from enum import IntEnum, auto
from typing import Any

from mpitrain.cluster import watchdog_messages as messages
from mpitrain.cluster.console import STDERR, Console
from mpitrain.cluster.hang_analysis import MOST_NAMED, HangReport, Rank, at_fault, report
from mpitrain.cluster.launcher_process import LauncherProcess
from mpitrain.cluster.nodes import Meeting, WatchdogNodes
from mpitrain.cluster.processes import (
    CONDITIONS,
    DEAF,
    condition,
    end_of,
    has_ended,
    held_in,
    in_words,
    send_signal,
    signal_when_parent_ends,
)
from mpitrain.cluster.shared_memory import free_bytes, too_little
from mpitrain.cluster.status_board import ABSENT, AT_WORK, LEFT, NOT_KNOWN, WAITING, Where, with_saved
from mpitrain.cluster.watchdog_connections import ConnectedRank, Connections, close

GATHER_S = 2.0  # waits end at almost the same moment; for the last rank to say so, and what for
FORWARD_S = 0.5  # launchers drop what they have not yet forwarded when a job is aborted
END_S = (1.5, 2.5)  # from the first rank that is asked to end the job until all are, then killed
ASK_S = 3.0  # for the watchdogs of other nodes to answer
AGAIN_S = 5.0  # after which they are asked again, where ranks waited for one that was at work
ELSEWHERE_S = 3.0  # for the first node's to report, before one that sent it trouble reports itself
CONNECT_S = 60.0  # for the first rank
LINGER_S = 6.0  # after the kill, for ranks that have not come yet: they learn that the job ends
COME_S = 2.0  # after the first rank is gone, for one that lives
APART_S = 0.5  # between the ends of ranks of a node, of which none was ended by the launcher
BY_LAUNCHERS = (signal.SIGKILL, signal.SIGTERM)  # that they end ranks with
BAD_INPUT = 2  # exit code: what is wrong with it is no matter of checkpoints


class WatchdogPhase(IntEnum):
    """How far the job is, as the watchdog of a node knows it."""

    GATHERING = auto()
    DOUBTING = auto()
    WATCHING = auto()
    ASKING = auto()
    ENDING = auto()
    ENDING_ALL = auto()
    KILLED = auto()


class Watchdog:
    """listener: where ranks connect, until all have.  nodes: the links to watchdogs of others.

    sure: whether a rank that is gone before all are known is the first: where launchers end a job,
    they kill the ranks of all its nodes.
    num_ranks: that the launcher has started on this node.
    starter: the process id of the rank that has started it; it may be gone before it connects.
    """

    def __init__(
        self,
        listener: socket.socket,
        nodes: WatchdogNodes | None = None,
        phase: WatchdogPhase = WatchdogPhase.GATHERING,
        sure: bool = True,
        console: Console | None = None,
        num_ranks: int = 1,
        launcher: LauncherProcess | None = None,
        starter: int | None = None,
    ):
        self.phase = phase
        self.nodes = nodes or WatchdogNodes()
        self.launcher = launcher or LauncherProcess([], [])
        self.console = console or Console()
        self.connections = Connections(listener, self.launcher)
        self._listen_to_nodes()
        self.sure = sure
        self.num_ranks = num_ranks
        self.shared_bytes = free_bytes()  # of shared memory, before MPI was started
        # DOUBTING: what to report if others live.  WATCHING: nobody is blamed for waiting before it.
        # ASKING: answers are waited for no more.  Else when the next phase begins.
        self.deadline = 0.0
        self.first_by = time.monotonic() + CONNECT_S  # for a rank to come; passed when one did
        self._starter = starter or os.getppid()
        # which rank has said that so many are here, and the descriptors it gave
        self.meeting: tuple[ConnectedRank, int, list[int]] | None = None
        self.doubted = HangReport("")  # of the rank that is gone while the watchdog is DOUBTING
        self.launcher_lost = False
        self.asked_by = ""  # the signal that has asked ranks to leave
        self.in_order = False  # ranks leave, and have said so
        self.has_spares = False  # for ranks that are gone
        self.gave_up: dict[int, str] = {}  # by number
        self.ask_at = float("inf")  # when the ranks here will have said for what they wait
        self.suspects: set[tuple[int, float]] = set()  # of the last look: rank, since when
        self.boards: dict[int, list[Rank]] = {}  # by node, what others have answered
        self.code = 1  # of the job
        self.saved = NOT_KNOWN  # of ranks that are gone

    def run(self) -> None:
        """Watch until no rank is left."""
        connections = self.connections
        while connections.connected or self._expects(time.monotonic()):
            for descriptor in connections.ready():
                listener = connections.listener
                if listener is not None and descriptor == listener.fileno():
                    self.first_by = 0.0 if connections.admit() else self.first_by
                elif self.nodes.listener is not None and descriptor == self.nodes.listener.fileno():
                    self._admit_node()
                elif descriptor == self.launcher.descriptor:
                    self._lose_launcher()
                elif descriptor in self.nodes.links:
                    self._hear_node(descriptor)
                elif descriptor in connections.lives:
                    self._lose(connections.lives[descriptor])
                elif descriptor in connections.connected and not self._hear(
                    connections.connected[descriptor]
                ):
                    self._hear_no_more(connections.connected[descriptor])
            self._act(time.monotonic())
        self.launcher.go_on()

    @property
    def met(self) -> bool:
        """Whether it is known who the ranks of this node are, and the job isn't ending."""
        return self.phase in (WatchdogPhase.WATCHING, WatchdogPhase.ASKING)

    @property
    def ended(self) -> bool:
        return self.phase >= WatchdogPhase.ENDING

    def _enter(self, phase: WatchdogPhase, seconds: float = 0.0) -> None:
        self.phase = phase
        self.deadline = time.monotonic() + seconds

    def _expects(self, now: float) -> bool:
        """Return whether somebody may still come."""
        if self.connections.listener is None:
            return False
        if self.phase is WatchdogPhase.DOUBTING:
            return now < self.deadline + COME_S
        if self.ended:
            return self.phase is not WatchdogPhase.KILLED or now < self.deadline
        if os.getppid() != self._starter:
            # the launcher waits for this process; a rank that comes later starts another
            self.first_by = min(self.first_by, now + COME_S)
        return now < self.first_by

    def _act(self, now: float) -> None:
        due = now > self.deadline
        if self.phase is WatchdogPhase.DOUBTING and due and self.connections.connected:
            self._end(self.doubted)
            # in MPI_Init a rank can't abort, and MPICH's launcher ends the ranks of other nodes
            # only for one that was killed
            self._kill()
        elif self.phase is WatchdogPhase.WATCHING and now >= self.ask_at:
            self._ask_around()
        elif self.phase is WatchdogPhase.WATCHING:
            self._look(now)
        elif self.phase is WatchdogPhase.ASKING and due:
            self._report()
        elif self.phase is WatchdogPhase.ENDING and due:
            self._ask(self.connections.ranks)
            self._enter(WatchdogPhase.ENDING_ALL, END_S[1])
        elif self.phase is WatchdogPhase.ENDING_ALL and due:
            self._kill()

    def _listen_to_nodes(self) -> None:
        listener = [] if self.nodes.listener is None else [self.nodes.listener.fileno()]
        self.connections.listen_to((*listener, *self.nodes.links))

    def _admit_node(self) -> None:
        try:
            self.connections.listen_to([self.nodes.accept()])
        except OSError:  # no descriptors are left; who can't connect reports for itself
            self.connections.forget(self.nodes.listener.fileno())
            self.nodes.listener.close()
            self.nodes.listener = None

    # ------------------------------------------------------------ what ranks say

    def _lose(self, rank: ConnectedRank) -> None:
        """Take what a rank that is gone has said before, and miss it."""
        # first: it is forgotten as soon as the launcher has heard of it
        status = None if rank.slot is None else end_of(rank.where.pid)
        while rank.number in self.connections.connected and self._hear(rank):
            pass
        if (reason := self._reason_of_the_end(rank)) is not None:
            self._lose(reason)
        if rank.number in self.connections.connected:
            self._miss(rank, status)
            self._drop(rank)

    def _reason_of_the_end(self, rank: ConnectedRank) -> ConnectedRank | None:
        """Return another rank that ends by itself, if this one was killed, or is forgotten."""
        if rank.slot is None or end_of(rank.where.pid) not in (None, *BY_LAUNCHERS):
            return None
        others = [(other, end_of(other.where.pid)) for other in self.connections.ranks if other is not rank]
        return next((other for other, end in others if end not in (None, *BY_LAUNCHERS)), None)

    def _hear_no_more(self, rank: ConnectedRank) -> None:
        """Let a connection be that was closed at the other end: when the rank is gone, its lifeline tells."""
        if rank.life is None:
            self._drop(rank)
        else:
            self.connections.forget(rank.number)

    def _drop(self, rank: ConnectedRank) -> None:
        """Know a rank no more, but for what it had saved."""
        if rank.slot is not None:
            self.saved = max(self.saved, rank.where.saved)
        self.connections.drop(rank)

    def _hear(self, rank: ConnectedRank) -> bool:
        """Take one message of a rank; return whether there was one."""
        if (received := rank.receive()) is None:
            return False
        message, descriptors, complete = received
        if message == messages.BYE:
            self._drop(rank)
            return True
        if rank.slot is None:
            self._greet(rank, descriptors)
            return True
        self._hear_message(rank, message, descriptors, complete)
        return True

    def _hear_message(
        self, rank: ConnectedRank, message: bytes, descriptors: list[int], complete: bool
    ) -> None:
        kind = message[:1]
        code, _, text = message[1:].decode(errors="replace").partition(" ")
        if kind == messages.FAILED or (kind == messages.GAVE_UP and not self.met):
            self._end(HangReport(text), int(code), first=rank)
        elif kind == messages.GAVE_UP:
            self.gave_up[rank.number] = text
            self.ask_at = min(self.ask_at, time.monotonic() + GATHER_S)
        elif kind == messages.ASKED:
            self._be_asked(int(code or signal.SIGTERM), text)
        elif kind == messages.LEAVES:  # each rank that was asked says so
            if not self.in_order and not self.ended:
                self.console.say(text)
            self.in_order = True
        elif kind == messages.SPARES:
            self.has_spares = True
        elif kind == messages.MEET and not complete:  # this process can't have more descriptors
            close(descriptors)
            rank.send(messages.REFUSED)
        elif kind == messages.MEET:
            self.meeting = rank, int(message[1:]), descriptors
            self._meet()

    def _greet(self, rank: ConnectedRank, descriptors: list[int]) -> None:
        """Know a rank from now on, if its descriptors came."""
        if not self.connections.greet(rank, descriptors):
            self._drop(rank)
            return
        rank.send(messages.READY + b" %d" % os.getpid())
        if self.ended:
            self._ask([rank])
        elif self.meeting:
            self._meet()

    def _meet(self) -> None:
        """Begin to watch limits when all ranks of this node are known; refuse if there are more."""
        rank, num_ranks, (stderr, meeting_fd, *door) = self.meeting
        if len(self.connections.ranks) < num_ranks:
            return
        complete = len(self.connections.ranks) == num_ranks
        self.meeting = None
        if complete:
            # of the node's first rank: what is said there may go to a file of that rank
            os.dup2(stderr, STDERR)
            os.close(stderr)
            self.connections.close_listener()
            self.nodes = WatchdogNodes(
                Meeting.read(meeting_fd), socket.socket(fileno=door[0]) if door else None
            )
            self.nodes.connect()
            self._listen_to_nodes()
            if self.phase is WatchdogPhase.GATHERING:
                self._enter(WatchdogPhase.WATCHING)
        else:
            close((stderr, meeting_fd, *door))
        rank.send(messages.READY if complete else messages.REFUSED)

    def _miss(self, rank: ConnectedRank, status: int | None) -> None:
        """Report a rank that is gone without a word. status: end_of() its process."""
        where = rank.where
        if self.ended or self._has_said_why(rank, where):
            return
        # which kills ranks when it ends: none ends with 0 then
        if self.met and status != 0 and self.launcher.is_gone():
            self._lose_launcher()
            return
        text = f"mpitrain: {self._asked}{where}: the process is gone: {_reason(status)}"
        if self.met and self.has_spares:  # ranks that live end the job if there are too few
            self.console.say(f"{text}; the others repair the job")
            self._forget()
            return
        if not self.met:
            text += self._launch_notes()
        if self.met or self.launcher_lost or (self.sure and not self.asked_by):
            self._end(HangReport(text), hides=status in (None, 0))
        elif not self.asked_by and self.phase is WatchdogPhase.GATHERING:
            self.doubted = HangReport(text)
            self._enter(WatchdogPhase.DOUBTING, APART_S)

    def _has_said_why(self, rank: ConnectedRank, where: Where) -> bool:
        leaves = self.in_order and where.phase == "end"
        return where.state in (ABSENT, LEFT) or rank.number in self.gave_up or leaves

    def _lose_launcher(self) -> None:
        """Report a lost launcher, if ranks are left: nothing else ends them if one is stopped."""
        if self.launcher_lost:
            return
        self._forget_launcher()
        if not (self.met or self.ended):
            for rank in self.connections.ranks:  # the system may close their lifelines later
                if rank.number in self.connections.connected and has_ended(rank.where.pid):
                    self._lose(rank)
        if self.phase is WatchdogPhase.DOUBTING:
            self._end(HangReport(self.doubted.text + self._lost_launcher()))
        if not self.in_order and any(
            rank.where.state not in (ABSENT, LEFT) for rank in self.connections.ranks
        ):
            how = (
                "ended before its ranks had left"
                if self.asked_by
                else "is gone: killed, crashed, or its terminal was closed"
            )
            self._end(HangReport(f"mpitrain: {self._asked}the launcher ({self.launcher}) {how}"))

    def _launch_notes(self) -> str:
        """Return what a report adds of a rank that is gone before MPI has started."""
        launcher = ""
        if self.launcher_lost or self.launcher.is_gone():
            self._forget_launcher()
            launcher = self._lost_launcher()
        little = too_little(self.shared_bytes, self.num_ranks)
        return launcher + (f"; {little}" if little else "")

    def _lost_launcher(self) -> str:
        """MPICH's crashes when a rank is killed in MPI_Init; and when it is killed, ranks are."""
        return f"; and so is the launcher ({self.launcher}): either may have been the first"

    def _forget_launcher(self) -> None:
        if not self.launcher_lost:
            self.launcher_lost = True
            self.connections.forget(self.launcher.descriptor)

    def _be_asked(self, number: int, text: str) -> None:
        if not self.asked_by and self.met and self.nodes.is_hub and text:
            self.console.say(text)
        self.asked_by = self.asked_by or signal.Signals(number).name

    @property
    def _asked(self) -> str:
        return f"asked to leave ({self.asked_by}), then " if self.asked_by else ""

    # ------------------------------------------------------------ what the watchdog sees

    def _look(self, now: float) -> None:
        """Ask around about a rank whose limit is over; if it waits, only where none here works."""
        ranks = [(rank, rank.where) for rank in self.connections.ranks]
        late = [where for rank, where in ranks if rank.is_late(where, now)]
        grace_s = GATHER_S if self.nodes.alone else GATHER_S + ELSEWHERE_S
        waiting = [where for _, where in ranks if where.state == WAITING and now > self.deadline]
        over = [where for where in waiting if now - where.since > where.limit_s + grace_s]
        before = self.suspects
        self.suspects = {(where.rank, where.since) for where in late + over}
        # in two looks: this process, or all of the machine, may have stood still
        if before & self.suspects and (late or not any(where.state in AT_WORK for _, where in ranks)):
            self._ask_around()

    def _board(self) -> list[Rank]:
        now = time.monotonic()
        ranks = []
        for rank in self.connections.ranks:
            where = rank.where
            late = rank.is_late(where, now)
            gave_up = self.gave_up.get(rank.number, "")
            for_s = now - where.since
            if not gave_up and where.state == WAITING and for_s > where.limit_s:
                gave_up = f"mpitrain: {where}: waits for {for_s:.0f} s"
            ranks.append(
                Rank(where, self.nodes.name, condition(where.pid), held_in(where.pid), for_s, gave_up, late)
            )
        return ranks

    # ------------------------------------------------------------ with the watchdogs of other nodes

    def _ask_around(self) -> None:
        """Have the first node's watchdog, which asks the others, report who is behind."""
        self.ask_at = float("inf")
        if self.phase is not WatchdogPhase.WATCHING:
            return
        if self.nodes.alone or (not self.nodes.is_hub and not self.nodes.links):
            self._report()
            return
        self.nodes.broadcast({"say": "where" if self.nodes.is_hub else "trouble"})
        self._enter(WatchdogPhase.ASKING, ASK_S + (0.0 if self.nodes.is_hub else ELSEWHERE_S))

    def _hear_node(self, descriptor: int) -> None:
        for node, message in self.nodes.hear(descriptor) or ():  # None: closed, and forgotten
            self._take(node, message)

    def _take(self, node: int, message: dict[str, Any]) -> None:
        said = message["say"]
        if self.ended:
            return
        if said == "trouble":
            self._ask_around()
        elif said == "where":
            if self.phase is WatchdogPhase.WATCHING:
                self._enter(WatchdogPhase.ASKING, ASK_S + ELSEWHERE_S)
            self.nodes.broadcast({"say": "board", "ranks": [rank.to_json() for rank in self._board()]})
        elif said == "board":
            self.boards[node] = [Rank.from_json(rank) for rank in message["ranks"]]
            if len(self.boards) == len(self.nodes.meeting.names) - 1 and self.phase is WatchdogPhase.ASKING:
                self._report()
        elif said == "go on":
            self._forget()
        elif said == "over":
            self._show_stacks(message["behind"])
            self._enter(WatchdogPhase.ENDING, END_S[0])
            self.code = message["code"]
            if self.nodes.is_hub:
                self.nodes.broadcast(message, but=node)

    def _report(self) -> None:
        names = self.nodes.meeting.names
        known = {self.nodes.meeting.node, *self.boards}
        silent = names[:1]
        if self.nodes.is_hub:
            silent = [name for number, name in enumerate(names) if number not in known]
        job_ranks = [*self._board(), *(rank for board in self.boards.values() for rank in board)]
        if silent or self.gave_up or at_fault(job_ranks):
            self._end(report(job_ranks, [] if self.nodes.alone else silent))
        else:
            self.nodes.broadcast({"say": "go on"})
            self._forget()

    def _forget(self) -> None:
        """Continue: those that wait, wait for ranks of another node, which are at work."""
        self._enter(WatchdogPhase.WATCHING, AGAIN_S)
        self.boards.clear()
        self.suspects.clear()

    # ------------------------------------------------------------ the end

    def _end(
        self, report: HangReport, code: int = 1, first: ConnectedRank | None = None, hides: bool = False
    ) -> None:
        """Print the report, and begin to end the job. Only the first trouble gets here.

        hides: whether the launcher may take what has happened for success.
        """
        if self.ended:
            return
        stopped = ""
        if self.launcher.go_on():
            # and MPICH's ranks may wait for it
            stopped = f"; the launcher ({self.launcher}) was stopped by a signal"
            time.sleep(FORWARD_S)  # it prints what ranks have said before
        saved = NOT_KNOWN if code == BAD_INPUT else self._saved()
        self.console.say(report.text if report.behind else with_saved(report.text + stopped, saved))
        self.nodes.broadcast({"say": "over", "code": code, "behind": report.behind})
        if hides:
            self.launcher.fail(FORWARD_S)
        if not self.met:
            self.console.close_own()
        # one after the other: launchers forward what they have read, be it half a line
        time.sleep(FORWARD_S)
        if report.behind:
            self._show_stacks(report.behind)
            time.sleep(FORWARD_S)
            names = f"rank{'s' * (len(report.behind) > 1)} {', '.join(map(str, report.behind[:MOST_NAMED]))}"
            self.console.say(
                with_saved(f"mpitrain: ending the job: {names} made no progress{stopped}", saved)
            )
        # nothing more is said, and a rank that the kernel holds may not end for long
        self.console.close()
        self._enter(WatchdogPhase.ENDING, END_S[0])
        self.code = code
        able = [rank for rank in self.connections.ranks if condition(rank.where.pid) not in DEAF]
        if code != 1:
            # each with the code: Open MPI may tell that of a rank that it has killed
            self._ask(able)
        elif able:
            self._ask([first] if first in able else able[:1])
        if not able:
            self._kill()

    def _saved(self) -> int:
        others = [rank.where.saved for board in self.boards.values() for rank in board]
        return max([self.saved, *others, *(rank.where.saved for rank in self.connections.ranks)])

    def _show_stacks(self, numbers: Iterable[int]) -> None:
        """Have ranks of this node print their stacks (guard.py), those that can."""
        for rank in self.connections.ranks:
            where = rank.where
            if where.rank in numbers and where.state != LEFT and condition(where.pid) not in CONDITIONS:
                send_signal(where.pid, signal.SIGUSR2)

    def _kill(self) -> None:
        for rank in self.connections.ranks:
            send_signal(rank.where.pid, signal.SIGKILL)
        self._enter(WatchdogPhase.KILLED, LINGER_S)

    def _ask(self, ranks: Iterable[ConnectedRank]) -> None:
        for rank in ranks:
            rank.send(b"%d" % self.code)


def _reason(status: int | None) -> str:
    """Return why a process may have ended that has this wait status, if it is known."""
    if status == 0:
        return "it ended with exit code 0 before the run did, as by exit(0) of a library or os._exit(0)"
    if status is None:
        return "killed, out of memory, crashed in native code, or ended by a call of exit"
    return f"killed, out of memory, or crashed in native code ({in_words(status)})"


def main() -> None:
    """Watch.

    Arguments: sure, num_ranks, starter, descriptors of the listener and of the launcher's stderr
    (-1: none), and those of a LauncherProcess.
    """
    sure, num_ranks, starter, listener, stderr, *launcher = map(int, sys.argv[1:])
    signal_when_parent_ends(signal.SIGCONT)
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        # a scheduler sends them to every process; this one ends with its ranks
        signal.signal(name, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # it holds three descriptors for each rank; shells often allow 1024
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    Watchdog(
        socket.socket(fileno=listener),
        sure=bool(sure),
        num_ranks=num_ranks,
        console=Console(None if stderr < 0 else stderr),
        launcher=LauncherProcess.from_arguments(launcher),
        starter=starter,
    ).run()
