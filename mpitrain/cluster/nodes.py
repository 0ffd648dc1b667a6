"""What the watchdogs of several nodes say to one another, over TCP: MPI may be what hangs.

    hub      the watchdog of the node with rank 0; it listens
    spoke    the watchdog of another node; it connects when it starts

    trouble  spoke to hub   a limit is over here: ask around
    where    hub to spokes  where are your ranks?
    board    spoke to hub   there, and in which condition
    over     both ways      reported: print nothing, show these stacks, end your ranks with this
                            code

Messages are lines of JSON. Any free port; MPI sends it, and a token that connections begin with,
as other programs of the cluster can connect. A node that can't be reached reports for itself.

Standard library only.
"""

import ipaddress
import json
import os
import select
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

CONNECT_S = 3.0  # to the hub; it listens already
SEND_S = 2.0
MOST_BYTES = 1 << 24  # of a message: a board of thousands of ranks
MOST_GREETING = 1 << 10


@dataclass(frozen=True)
class Meeting:
    """How watchdogs find one another. node: number of this one, 0: the hub.  names: of all."""

    node: int = 0
    names: tuple[str, ...] = ("",)
    addresses: tuple[str, ...] = ()
    port: int = 0
    token: str = ""

    def written(self) -> int:
        """Write it to a file that is only memory, for a process to inherit; return its descriptor."""
        descriptor = os.memfd_create("mpitrain-meeting", os.MFD_CLOEXEC)
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(json.dumps(asdict(self)).encode())
        return descriptor

    @staticmethod
    def read(descriptor: int) -> "Meeting":
        """Read what was written, and close it."""
        with os.fdopen(descriptor, "rb") as file:
            file.seek(0)
            fields = json.loads(file.read())
        return Meeting(
            **{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
        )


def addresses_here() -> tuple[str, ...]:
    """Return the IPv4 addresses of this node, in this network namespace; loopback ones last."""
    lines = list[str]()
    with suppress(OSError):
        lines = Path("/proc/net/fib_trie").read_text(encoding="ascii").splitlines()
    pairs = zip(lines, lines[1:])
    local = [line.split()[-1] for line, after in pairs if after.strip() == "/32 host LOCAL"]
    known = dict.fromkeys(local or ["127.0.0.1"])
    return tuple(sorted(known, key=lambda address: ipaddress.ip_address(address).is_loopback))


def unique_names(names: list[str]) -> tuple[str, ...]:
    """Return names of nodes, numbered where several have one: one host plays them."""
    return tuple(f"{name}#{number}" if names.count(name) > 1 else name for number, name in enumerate(names))


@dataclass
class WatchdogLink:
    """A connection to another watchdog. node: its number; -1: it hasn't said."""

    socket: socket.socket
    node: int = -1
    read: bytes = b""

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message; return False, and end the link, if nobody takes it, or half of it."""
        try:
            self.socket.settimeout(SEND_S)
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            with suppress(OSError):  # the other end was first
                self.socket.shutdown(socket.SHUT_RDWR)
            return False
        return True

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come, or None: it is closed, or sends what no watchdog does."""
        try:
            content = self.socket.recv(1 << 16)
        except OSError:
            return None
        *lines, self.read = (self.read + content).split(b"\n")
        most = MOST_GREETING if self.node < 0 else MOST_BYTES
        if not content or max(map(len, (self.read, *lines))) > most:
            return None
        try:
            return [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None


@dataclass
class WatchdogNodes:
    """The links of one watchdog. listener: of the hub."""

    meeting: Meeting = Meeting()
    listener: socket.socket | None = None
    links: dict[int, WatchdogLink] = field(default_factory=dict)  # by file descriptor

    @property
    def alone(self) -> bool:
        """Whether there is no other node."""
        return len(self.meeting.names) == 1

    @property
    def is_hub(self) -> bool:
        return self.meeting.node == 0

    @property
    def name(self) -> str:
        return self.meeting.names[self.meeting.node]

    def connect(self) -> None:
        """Connect a spoke to the hub, over whichever of its addresses answers first."""
        if self.is_hub:
            return
        for connection in _answering(self.meeting):
            link = WatchdogLink(connection, node=0)
            if link.send({"token": self.meeting.token, "node": self.meeting.node}) and _welcome(connection):
                self.links[connection.fileno()] = link
                return
            connection.close()

    def accept(self) -> int:
        """Take a connection; return its file descriptor."""
        connection, _ = self.listener.accept()
        self.links[connection.fileno()] = WatchdogLink(connection)
        return connection.fileno()

    def hear(self, descriptor: int) -> list[tuple[int, dict[str, Any]]] | None:
        """Return (node, message) of what has come over a link; None: it is closed."""
        link = self.links[descriptor]
        messages = link.receive()
        if messages and link.node < 0:
            greeting = messages.pop(0)
            known = isinstance(greeting, dict) and greeting.get("token") == self.meeting.token
            if not known or not link.send({"welcome": self.name}):
                messages = None
            else:
                link.node = int(greeting["node"])
        if messages is None:
            self.links.pop(descriptor).socket.close()
            return None
        return [(link.node, message) for message in messages]

    def broadcast(self, message: dict[str, Any], but: int = -1) -> None:
        """Send a message over all links, but to one node."""
        for link in list(self.links.values()):
            if link.node not in (-1, but):
                link.send(message)


def _answering(meeting: Meeting) -> Iterator[socket.socket]:
    """Yield connections to the hub, in the order in which its addresses answer."""
    open_ = {}
    poll = select.poll()
    for address in meeting.addresses:
        try:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        except OSError:
            break  # of descriptors there are no more
        connection.setblocking(False)
        connection.connect_ex((address, meeting.port))
        open_[connection.fileno()] = connection
        poll.register(connection, select.POLLOUT)
    end = time.monotonic() + CONNECT_S
    while open_ and time.monotonic() < end:
        for descriptor, _ in poll.poll(1000 * max(0.0, end - time.monotonic())):
            poll.unregister(descriptor)
            connection = open_.pop(descriptor)
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                connection.close()
            else:
                connection.settimeout(SEND_S)
                yield connection
    for connection in open_.values():
        connection.close()


def _welcome(connection: socket.socket) -> bool:
    """Return whether the hub answers. Read its line only: the next may have come, too."""
    try:
        line, end, _ = connection.recv(MOST_GREETING, socket.MSG_PEEK).partition(b"\n")
        return b"welcome" in connection.recv(len(line + end))
    except OSError:
        return False
