"""Where a watchdog speaks: on the stderr of Open MPI's launcher itself, where that runs on this node.

What ranks and their watchdog write goes through the launcher, and that of Open MPI reads no more of it once a rank has ended with an exit
code: the reason would be lost with it. Elsewhere a watchdog speaks on the stderr it was given.

Standard library only: the watchdog starts in milliseconds.
"""

import ctypes
import os
import select
import stat
import time
from contextlib import suppress

from mpitrain.cluster.processes import parents_of

LAUNCHERS = ("prterun", "mpirun", "mpiexec", "orterun")
STDERR = 2
PIDFD_GETFD = 438  # the number of the system call, Linux 5.6
PIECE = 4096  # bytes that a pipe takes at once where it takes any
PATIENCE_S = 2.0  # with a reader who doesn't read


class Outlet:
    """Made early: later the launcher may be nobody's parent any more."""

    def __init__(self):
        self._launcher = _launcher() if "PMIX_NAMESPACE" in os.environ else 0

    def write(self, text: str) -> None:
        """Write lines, unless nobody reads them: the job is ended all the same."""
        found = _stderr_of(self._launcher) if self._launcher else None
        try:
            _write(STDERR if found is None else found, (text.rstrip("\n") + "\n").encode(errors="replace"))
        finally:
            if found is not None:  # whoever reads waits for its end
                os.close(found)


def _write(number: int, content: bytes) -> None:
    end = time.monotonic() + PATIENCE_S
    with suppress(OSError):
        while content and select.select([], [number], [], max(0.0, end - time.monotonic()))[1]:
            content = content[os.write(number, content[:PIECE]) :]


def _launcher() -> int:
    """Return the process that is Open MPI's launcher among those above this one; 0 if none is."""
    return next((pid for pid, name in parents_of(os.getpid()) if name in LAUNCHERS), 0)


def _stderr_of(pid: int) -> int | None:
    """Return a descriptor of what a process has as its stderr, or None."""
    try:
        process = os.pidfd_open(pid)
        try:
            found = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, STDERR, 0)
        finally:
            os.close(process)
        return found if found >= 0 else _opened(f"/proc/{pid}/fd/{STDERR}")
    except (OSError, AttributeError):  # another system
        return None


def _opened(path: str) -> int | None:
    """Open what somebody has open once more. Not a file with a place of its own in it: the launcher would write over what this wrote."""
    kind = os.stat(path).st_mode
    if not (stat.S_ISFIFO(kind) or stat.S_ISCHR(kind)):
        return None
    return os.open(path, os.O_WRONLY | os.O_NOCTTY)
