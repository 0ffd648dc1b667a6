"""The watchdog of a node: one small process that knows where every rank is, and speaks and acts for those that can't.

    what it reports                how it knows
    a rank failed                  the rank sends its report before it ends
    a rank gave up a wait          the same; a moment later all have, and the one that waits for nobody is the one behind
    a rank is stuck                its place is the same for its limit, and it neither computes nor reads nor writes
    a rank is gone                 its socket closed before it said that it leaves

The first trouble is reported, once; what follows from it isn't. Then the job is ended: a rank is asked to (by MPI_Abort, with the
exit code), a moment later all are, and what is left is killed. A stopped process can do nothing of this itself, and neither can
one that was killed, crashed, or is held in a system call: so this is a process of its own.

Standard library only. Started by guard.py.
"""

import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from mmap import mmap

from mpitrain.cluster.board import ABSENT, BUSY, HUNG, LEFT, SLOT, WAITING, WORKING, Where, read_slot

LOOK_S = 0.25
GATHER_S = 2.0  # waits end at almost the same moment; time for the last rank to say so, and what for
FORWARD_S = 0.5  # launchers drop what they have not yet forwarded when a job is aborted: the reason would be lost
END_S = (1.5, 4.0)  # after the first rank is asked to end the job: until all are, until they are killed
ELSEWHERE_S = 3.0  # a node none of whose ranks is behind lets the node speak that has the one behind
CONNECT_S = 60.0
STEPPING = ("step", "validation")
STEP_GRACE_S = 3.0  # in a step the ranks that wait speak first: they know for what
IO_LINES = (0, 1, 4, 5)  # of a thread's io in /proc: rchar and wchar, of calls; read_bytes and write_bytes, of memory-mapped files, too
AT_WORK = (WORKING, BUSY, LEFT)
SHARE = 0.05  # of a core, that tells work from waiting: there may be many more ranks than cores
MOST_NAMED = 8

FAILED, GAVE_UP = b"F", b"W"  # what a rank sends, with its text; a greeting is the number of its slot
READY = b"ready"  # the answer to a greeting; what else a rank is sent is the exit code to end the job with
CONDITIONS = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "held in the kernel, as by a disk or a network file system that doesn't answer",
    "Z": "dead",
    "": "dead",
}
DEAF = ("T", "t", "Z", "")  # of these conditions: those in which nothing is heard any more


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
            used = _used(where.pid)
            if used[0] > self.used[0] or used[1] - self.used[1] > SHARE * (now - self.looked):
                self.worked = now
            self.looked, self.used = now, used
        return now - max(where.since, self.worked)


@dataclass
class Seen:
    """A rank as the watchdog knows it."""

    slot: int
    connection: socket.socket
    activity: Activity = field(default_factory=Activity)


@dataclass
class Watchdog:
    """listener: where ranks connect.  board: one slot for each of `num_ranks`.  alone: there is no other node."""

    listener: socket.socket
    board: memoryview
    num_ranks: int
    alone: bool
    seen: dict[int, Seen] = field(default_factory=dict)  # by file descriptor, of ranks that are connected
    gave_up: dict[int, str] = field(default_factory=dict)  # by slot
    suspects: set[tuple[int, float]] = field(default_factory=set)  # of the last look: rank, since when
    report_at: float = float("inf")
    ended_at: float = float("inf")
    code: int = 1
    asked: int = 0  # how far the end has come

    def run(self) -> None:
        """Watch until no rank is left."""
        poll = select.epoll()  # gives what happened in its order: a launcher kills all ranks milliseconds after the first has died
        poll.register(self.listener, select.EPOLLIN)
        begin, came = time.monotonic(), 0
        while self.seen or (came < self.num_ranks and time.monotonic() - begin < CONNECT_S):
            for descriptor, _ in poll.poll(LOOK_S):
                if descriptor == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    self.seen[connection.fileno()] = Seen(-1, connection)
                    poll.register(connection, select.EPOLLIN)
                    came += 1
                elif not self._hear(self.seen[descriptor]):
                    poll.unregister(descriptor)
                    self.seen.pop(descriptor).connection.close()
            now = time.monotonic()
            if self.ended_at < now:
                self._go_on_ending(now)
            elif now >= self.report_at:
                self._report_waits()
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
            if where is not None and where.state not in (ABSENT, LEFT) and rank.slot not in self.gave_up:
                self._end(f"mpitrain: {where}: the process is gone: killed, out of memory, or crashed in native code")
            return False
        kind, (code, _, text) = message[:1], message[1:].decode(errors="replace").partition(" ")
        if kind == FAILED:
            self._end(text, int(code), first=rank)
        elif kind == GAVE_UP:
            self.gave_up[rank.slot] = text
            self.report_at = min(self.report_at, time.monotonic() + GATHER_S)
        else:
            rank.slot = int(message)
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
        """Report a rank whose limit is over; ranks that wait are at fault only if none here works."""
        ranks = [(rank, self._where(rank)) for rank in self._ranks]
        late = [where for rank, where in ranks if where.state in AT_WORK and rank.activity.idle_s(where, now) > where.limit_s]
        grace_s = GATHER_S if self.alone else GATHER_S + ELSEWHERE_S
        over = [where for _, where in ranks if where.state == WAITING and now - where.since > where.limit_s + grace_s]
        before, self.suspects = self.suspects, {(where.rank, where.since) for where in late + over}
        if not before & self.suspects:
            return  # nobody is reported for one look: this process, or all of the machine, may have stood still
        if late:
            late = [where for where in late if _condition(where.pid) in CONDITIONS] or late
            self._end("\n".join(f"mpitrain: {_stuck(where, now)}" for where in late[:MOST_NAMED]), stacks=late)
        elif not any(where.state in AT_WORK for _, where in ranks):
            texts = [f"mpitrain: {where}: waits for {now - where.since:.0f} s" for where in over]
            self._end(_waits(texts, [where for _, where in ranks], now))

    def _report_waits(self) -> None:
        now = time.monotonic()
        ranks = {rank.slot: self._where(rank) for rank in self._ranks}
        behind = [where for slot, where in ranks.items() if slot not in self.gave_up]
        if not behind and not self.alone and now < self.report_at + ELSEWHERE_S:
            return
        self._end(_waits(self.gave_up.values(), ranks.values(), now), stacks=behind)

    # ------------------------------------------------------------ the end

    def _end(self, text: str, code: int = 1, first: Seen | None = None, stacks: Sequence[Where] = ()) -> None:
        """Print the report, and begin to end the job. Only the first trouble gets here."""
        if self.ended_at < float("inf"):
            return
        _print(text)
        time.sleep(FORWARD_S)  # launchers forward what they have read of each process, be it half a line: one after the other
        for where in stacks:
            if _condition(where.pid) not in CONDITIONS:
                _signal(where.pid, signal.SIGUSR2)  # its stack, see guard.py
        if stacks:
            time.sleep(FORWARD_S)
        self.ended_at, self.code = time.monotonic(), code
        able = [rank for rank in self._ranks if _condition(self._where(rank).pid) not in DEAF]
        if code != 1:
            self._ask(able)  # each with the code: Open MPI may tell that of a rank that it has killed
        elif able:
            self._ask([first] if first in able else able[:1])
        if not able:
            self._kill()

    def _go_on_ending(self, now: float) -> None:
        if self.asked == 0 and now - self.ended_at > END_S[0]:
            self._ask(self._ranks)
            self.asked = 1
        elif self.asked == 1 and now - self.ended_at > END_S[1]:
            self._kill()

    def _kill(self) -> None:
        for rank in self._ranks:
            _signal(self._where(rank).pid, signal.SIGKILL)
        self.asked = 2

    def _ask(self, ranks: Iterable[Seen]) -> None:
        for rank in ranks:
            try:
                rank.connection.send(b"%d" % self.code)
            except OSError:
                continue  # gone already


# ---------------------------------------------------------------- texts


def condition_of(pid: int, otherwise: str) -> str:
    """Return why a process does nothing, in words, as far as the system knows."""
    return CONDITIONS.get(_condition(pid), otherwise)


def _stuck(where: Where, now: float) -> str:
    how = condition_of(where.pid, "it does nothing")
    return f"{where}: stuck for {now - where.since:.0f} s, the limit is {where.limit_s:g} s (comm.timeout_s): {how}"


def _waits(gave_up: Iterable[str], ranks: Iterable[Where], now: float) -> str:
    """Return a line for each rank that waits, and name the first behind: one that waits for nobody, else the one least far."""
    lines = list(gave_up)[:MOST_NAMED]
    ranks = list(ranks)
    stopped = [where for where in ranks if _condition(where.pid) in CONDITIONS]
    behind = stopped or [where for where in ranks if where.state not in (HUNG, WAITING)]
    if behind:
        for where in behind[:MOST_NAMED]:
            how = condition_of(where.pid, "it waits for no message: it computes or is stuck")
            lines.append(f"mpitrain: first behind: {where}, for {now - where.since:.0f} s: {how}")
    elif ranks:
        least = min(ranks, key=lambda where: (where.step, where.position))
        lines.append(f"mpitrain: first behind on this node: {least}")
    return "\n".join(lines)


def _print(text: str) -> None:
    try:
        os.write(2, (text.rstrip("\n") + "\n").encode(errors="replace"))
    except OSError:
        return  # nobody listens; the job is ended all the same


# ---------------------------------------------------------------- what the system knows of a process


def _condition(pid: int) -> str:
    """Return the letter of a process's state in /proc; "" if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def _used(pid: int) -> tuple[int, float]:
    """Return the bytes that a process's main thread has read and written, and the seconds it has computed.

    Other threads, such as the one that keeps the lock of the run directory, are at work whatever becomes of the main one.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/io", "rb") as file:
            lines = file.read().splitlines()
        moved = sum(int(lines[at].split()[1]) for at in IO_LINES)
        with open(f"/proc/{pid}/task/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return moved, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0, 0.0


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def main() -> None:
    """Watch: the arguments are the file descriptors of listener and board, the number of ranks here, and of nodes."""
    listener, board, num_ranks, num_nodes = map(int, sys.argv[1:])
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # a scheduler sends them to every process; this one ends with its ranks
    memory = memoryview(mmap(board, num_ranks * SLOT))
    Watchdog(socket.socket(fileno=listener), memory, num_ranks, num_nodes == 1).run()
