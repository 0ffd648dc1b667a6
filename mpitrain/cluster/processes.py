"""What the system knows of a process, in /proc: its state, what it has done, where the kernel holds it.

Standard library only: the watchdog starts in milliseconds.
"""

import ctypes
import os
import resource
import signal
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

PR_SET_PDEATHSIG = 1  # of prctl(2)
IO_LINES = (0, 1, 4, 5)  # rchar, wchar; read_bytes, write_bytes: of memory-mapped files, too
CONDITIONS = {
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "D": "held in the kernel, as by a disk or a network file system that doesn't answer",
    "Z": "dead",
    "": "dead",
}
EXITING = 0x4  # of the flags of a process: PF_EXITING
DEAF = ("T", "t", "Z", "")  # the conditions in which nothing is heard any more


class ProcessStat(NamedTuple):
    """What /proc/PID/stat has of a process (proc(5)). fields: after its name; the first is its state."""

    name: str
    fields: list[str]


class Peer(NamedTuple):
    """The process at the other end of a local socket."""

    pid: int
    uid: int
    gid: int


def peer_of(connection: socket.socket) -> Peer:
    """Return who is at the other end of a local socket; of one that connected, who listened."""
    return Peer(*struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)))


def condition(pid: int) -> str:
    """Return the letter of a process's state; "" if there is no such process."""
    with suppress(OSError, IndexError):
        return stat_of(pid).fields[0]
    return ""


def has_ended(pid: int) -> bool:
    """Return whether a process has ended, be it that its parent doesn't know yet."""
    return condition(pid) in ("Z", "X", "")


def end_of(pid: int) -> int | None:
    """Return the wait status of a process that is ending or has ended; None of another, or one forgotten."""
    with suppress(OSError, IndexError):
        fields = stat_of(pid).fields
        return int(fields[49]) if int(fields[6]) & EXITING else None
    return None


def in_words(status: int) -> str:
    """Say how a process has ended that has this wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"


def parents_of(pid: int) -> Iterator[tuple[int, str]]:
    """Yield the processes above one, the nearest first, each with its name."""
    with suppress(OSError, IndexError):
        while (pid := int(stat_of(pid).fields[1])) > 1:
            yield pid, stat_of(pid).name


def stat_of(pid: int | str, thread: int | None = None) -> ProcessStat:
    """Return what /proc has of a process, or of one of its threads. Raises OSError if there is none."""
    path = f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat"
    with open(path, encoding="utf-8", errors="replace") as file:
        before, _, after = file.read().rpartition(")")
    return ProcessStat(before.partition("(")[2], after.split())


def name_of(pid: int) -> str:
    """Return the name of a process; "" if there is no such process."""
    with suppress(OSError):
        return stat_of(pid).name
    return ""


def held_in(pid: int) -> str:
    """Return the function of the kernel that a process waits in; "" if it is in none, or that isn't shown."""
    with suppress(OSError):
        kernel_function = Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip()
        return "" if kernel_function == "0" else kernel_function
    return ""


def used(pid: int) -> tuple[int, float]:
    """Return the bytes that a process's main thread has read and written, and its seconds of CPU.

    Other threads, such as that of the run directory's lock, are at work whatever becomes of it.
    """
    try:
        with open(f"/proc/{pid}/task/{pid}/io", "rb") as file:
            lines = file.read().splitlines()
        moved = sum(int(lines[at].split()[1]) for at in IO_LINES)
        fields = stat_of(pid, pid).fields
        return moved, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0, 0.0


def no_more() -> str:
    """Say which limits keep this process from starting threads and processes, and what raises them."""
    most, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    user = "unlimited" if most == resource.RLIM_INFINITY else f"{most:,}"
    limits = f"this user may have {user} threads (ulimit -u)"
    group = _cgroup_pids("max")
    if group not in ("", "max"):
        number = _cgroup_pids("current")
        limits += f", of its cgroup {int(group):,} (pids.max), of which {number} are there"
    return f"{limits}; raise the limit, or start fewer ranks"


def _cgroup_pids(name: str) -> str:
    with suppress(OSError, ValueError):
        groups = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
        for _, controllers, path in groups:
            for base in ("/sys/fs/cgroup", "/sys/fs/cgroup/pids"):
                file = Path(f"{base}{path}/pids.{name}")
                if controllers in ("", "pids") and file.exists():
                    return file.read_text().strip()
    return ""


def signal_when_parent_ends(number: signal.Signals) -> None:
    """Have the system send this process a signal when the thread that started it ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal to a process, if there is one."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
