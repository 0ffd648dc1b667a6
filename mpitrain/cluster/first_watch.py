"""From a rank's first line until the watchdog of its node knows it: a small process that says which rank was gone before.

    rank         first watch
    name         remembers it
    "watched"    forgets a group of ranks when all of it said so: now the watchdog answers for them
    "over"       ends: a rank has said itself why the job ends, or ends in good order
    gone         prints one report, has the others of this node end, and ends

The ranks of one launcher on one node share it: whoever comes first starts it, behind a socket that has the name of the launcher. Where it
can't be had, a rank goes on without.

Standard library only. Started by guard.py.
"""

import os
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

from mpitrain.cluster.outlet import Outlet
from mpitrain.cluster.processes import parents_of, peer_of, send_signal, start_apart

WATCHED, OVER = b"watched", b"over"
TRIES, AGAIN_S = 100, 0.02
COME_S = 20.0  # for the first rank
FORWARD_S = 0.5  # launchers drop what they have not yet forwarded when a job ends: the reason would be lost
END_S = 3.0  # for ranks to end that were asked to, until they are killed
CODE = b"1"  # to end with
PROXIES = ("hydra_pmi_proxy",)
BACKLOG = 4096


def join_first_watch(who: str) -> socket.socket | None:
    """Return this rank's connection to the first watch of its node; None where there is none. who: as reports call the rank."""
    job = _job()
    if not job or not sys.platform.startswith("linux"):
        return None
    address = f"\0mpitrain-first-{os.getuid()}-{job}"[:107]
    with suppress(OSError):
        for _ in range(TRIES):
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(address)
                if peer_of(connection).uid != os.getuid():
                    return None  # somebody took the name
                connection.send(who.encode(errors="replace")[:512])
                return connection
            except ConnectionRefusedError:
                connection.close()
            if not _begin(address):
                time.sleep(AGAIN_S)  # another rank begins
    return None


def _job() -> str:
    """Return what the ranks of one launcher on this node have in common, and no other; "" if that isn't known."""
    if name := os.environ.get("PMIX_NAMESPACE"):
        return name
    proxy = next((pid for pid, name in parents_of(os.getpid()) if name in PROXIES), 0)
    if proxy:
        return f"{os.readlink('/proc/self/ns/pid')}-{proxy}"
    step = [os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    return "-".join(["slurm", *step]) if all(step) else ""


def _begin(address: str) -> bool:
    """Start the process behind the address, if nobody has yet."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:
            return False
        listener.listen(BACKLOG)
        start_apart("mpitrain-first-watch", __name__, [], [listener.fileno()])
    return True


@dataclass
class Rank:
    """A rank that is connected. group: the address of its watchdog, once it has one, and how many ranks that has."""

    connection: socket.socket
    who: str = ""
    group: bytes = b""


class FirstWatch:
    """listener: where ranks connect."""

    def __init__(self, listener: socket.socket, outlet: Outlet):
        self._listener, self._outlet = listener, outlet
        self._ranks: dict[int, Rank] = {}
        self._over = False

    def run(self) -> None:
        """Watch until no rank is left."""
        poll = select.epoll()  # in the order of what happened: a launcher ends the others soon after the first
        poll.register(self._listener, select.EPOLLIN)
        wait_s = COME_S
        while not self._over and (events := poll.poll(wait_s)):
            for descriptor, _ in events:
                if descriptor == self._listener.fileno():
                    self._open(poll)
                elif descriptor in self._ranks and not self._over:
                    self._hear(self._ranks[descriptor])
            wait_s = None if self._ranks else 0

    def _open(self, poll: select.epoll) -> None:
        connection, _ = self._listener.accept()
        if peer_of(connection).uid == os.getuid():
            self._ranks[connection.fileno()] = Rank(connection)
            poll.register(connection, select.EPOLLIN)

    def _hear(self, rank: Rank) -> None:
        try:
            message = rank.connection.recv(1 << 12)
        except OSError:
            message = b""
        if not rank.who and message:
            rank.who = message.decode(errors="replace")
        elif message.startswith(WATCHED):
            rank.group = message
            self._release(message)
        elif message.startswith(OVER):
            self._over = True
        else:
            self._gone(rank)

    def _release(self, group: bytes) -> None:
        """Forget the ranks of a watchdog that has all of its own."""
        members = [rank for rank in self._ranks.values() if rank.group == group]
        if len(members) == int(group.split()[1]):
            for rank in members:
                self._forget(rank)

    def _forget(self, rank: Rank) -> None:
        del self._ranks[rank.connection.fileno()]
        rank.connection.close()

    def _gone(self, rank: Rank) -> None:
        """Report, and end the ranks of this node; those of others end by their launcher, or by their limit."""
        self._forget(rank)
        if not rank.who:
            return
        self._over = True
        self._outlet.write(
            f"mpitrain: {rank.who} in phase start, before its watchdog was there: the process is gone: killed, out of memory, or crashed "
            "in native code"
        )
        time.sleep(FORWARD_S)
        for other in self._ranks.values():
            with suppress(OSError):
                other.connection.send(CODE)
        end = time.monotonic() + END_S
        while self._ranks and time.monotonic() < end:
            for descriptor in select.select(list(self._ranks), [], [], END_S)[0]:
                with suppress(OSError):
                    if self._ranks[descriptor].connection.recv(1 << 12):
                        continue
                self._forget(self._ranks[descriptor])
        for other in self._ranks.values():
            send_signal(peer_of(other.connection).pid, signal.SIGKILL)


def main() -> None:
    """Watch. The argument is the file descriptor of the listener."""
    for name in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(name, signal.SIG_IGN)  # a scheduler sends them to every process; this one ends with its ranks
    FirstWatch(socket.socket(fileno=int(sys.argv[1])), Outlet()).run()
