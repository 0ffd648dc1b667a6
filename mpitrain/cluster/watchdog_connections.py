"""Whom a watchdog hears: ranks of its node, the watchdogs of others, and the end of its launcher.

Each rank has a connection, for messages, and a lifeline. epoll gives events in their order, but a
descriptor that it has given already stays in front.

Standard library only.
"""

import os
import select
import socket
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from mpitrain.cluster.activity import Activity
from mpitrain.cluster.launcher_process import LauncherProcess
from mpitrain.cluster.processes import peer_of
from mpitrain.cluster.status_board import AT_WORK, Where, read_slot, seen_slot

LOOK_S = 0.25
MOST_DESCRIPTORS = 3
MOST_BYTES = 1 << 20  # of a message


@dataclass
class ConnectedRank:
    """A rank of this node. number: of its connection.  slot, life: None until it has greeted."""

    number: int
    connection: socket.socket
    slot: memoryview | None = None
    life: int | None = None
    activity: Activity = field(default_factory=Activity)

    @property
    def where(self) -> Where:
        return read_slot(self.slot)

    def is_late(self, where: Where, now: float) -> bool:
        """Return whether it is at work and has done nothing for longer than its limit."""
        return where.state in AT_WORK and self.activity.idle_s(where, now) > where.limit_s

    def send(self, message: bytes) -> None:
        with suppress(OSError):  # gone already
            self.connection.send(message)

    def receive(self) -> tuple[bytes, list[int], bool] | None:
        """Return a message, its descriptors, and whether all of these came; None: there is no message."""
        try:
            message, descriptors, flags, _ = socket.recv_fds(
                self.connection, MOST_BYTES, MOST_DESCRIPTORS, socket.MSG_DONTWAIT
            )
        except OSError:
            return None
        return (message, descriptors, not flags & socket.MSG_CTRUNC) if message else None


class Connections:
    """listener: where ranks connect; None: nobody can any more.

    connected: ranks by the descriptor of their connection.  lives: the same by lifeline.
    """

    def __init__(self, listener: socket.socket | None, launcher: LauncherProcess):
        self.listener = listener
        self.connected: dict[int, ConnectedRank] = {}
        self.lives: dict[int, ConnectedRank] = {}
        self._dropped: set[int] = set()  # descriptors of which the poll may still tell
        self._launcher = launcher.descriptor
        self._poll = select.epoll()
        self.listen_to(number for number in (listener, launcher.descriptor) if number is not None)

    @property
    def ranks(self) -> list[ConnectedRank]:
        """The ranks that have said who they are."""
        return [rank for rank in self.connected.values() if rank.slot is not None]

    def ready(self) -> Iterator[int]:
        """Wait for LOOK_S at most; yield the descriptors on which something has happened.

        The launcher's comes last: a rank that is gone as well may be the reason, and is named.
        """
        self._dropped.clear()
        ready = [descriptor for descriptor, _ in self._poll.poll(LOOK_S)]
        for descriptor in sorted(ready, key=lambda number: number == self._launcher):
            if descriptor not in self._dropped:  # and its number may be another's by now
                yield descriptor

    def listen_to(self, descriptors: Iterable[int | socket.socket]) -> None:
        for descriptor in descriptors:
            self._poll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        self._poll.unregister(descriptor)

    def admit(self) -> bool:
        """Let a rank of this node in, nobody else's process; return False if none can be any more."""
        try:
            connection, _ = self.listener.accept()
        except OSError:  # no descriptors are left; who can't connect starts another watchdog
            self.close_listener()
            return False
        if peer_of(connection).uid != os.getuid():
            connection.close()
            return False
        self.connected[connection.fileno()] = ConnectedRank(connection.fileno(), connection)
        self.listen_to([connection])
        return True

    def greet(self, rank: ConnectedRank, descriptors: list[int]) -> bool:
        """Know a rank from now on; return False if its descriptors didn't come: too many."""
        try:
            slot, life = descriptors
            rank.slot = seen_slot(slot)  # which is one more
        except (ValueError, OSError):
            close(descriptors)
            return False
        rank.life = life
        os.close(slot)
        self.lives[life] = rank
        self._poll.register(life, 0)  # that it is closed, is reported in any case
        return True

    def drop(self, rank: ConnectedRank) -> None:
        """Know a rank no more."""
        del self.connected[rank.number]
        self._dropped.add(rank.number)
        rank.connection.close()  # and so it is forgotten by the poll
        if rank.life is not None:
            del self.lives[rank.life]
            self._dropped.add(rank.life)
            self._poll.unregister(rank.life)
            os.close(rank.life)

    def close_listener(self) -> None:
        """Let nobody in any more; the name is free."""
        if self.listener is not None:
            self._poll.unregister(self.listener)
            self.listener.close()
            self.listener = None


def close(descriptors: Iterable[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
