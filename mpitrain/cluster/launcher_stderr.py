"""The standard error of the launcher itself, for the watchdog to speak on (console.py)."""

import ctypes
import os
import stat

from mpitrain.cluster.console import STDERR
from mpitrain.cluster.launch import launcher

PIDFD_GETFD = 438  # the number of the system call, Linux 5.6


def stderr_of_launcher() -> int | None:
    """Return a descriptor of the standard error of this rank's launcher; None: it can't be had.

    For a rank to call and to give on: the launcher of a single one has ended as soon as that has.
    """
    pid = launcher()
    try:
        return (_duplicate(pid) or _open_again(pid)) if pid and _inherited(pid) else None
    except OSError:
        return None


def _inherited(pid: int) -> bool:
    """Return whether a process has a standard error; else the number is of a file of its own."""
    flags = _flags(pid)
    return not flags & os.O_CLOEXEC and flags & os.O_ACCMODE != os.O_RDONLY


def _duplicate(pid: int) -> int | None:
    """Return the very descriptor of another process; None where the system can't, or forbids it."""
    try:
        process = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return None
    try:
        descriptor = ctypes.CDLL(None, use_errno=True).syscall(PIDFD_GETFD, process, STDERR, 0)
    finally:
        os.close(process)
    return descriptor if descriptor >= 0 else None


def _open_again(pid: int) -> int | None:
    """Open what another process has; a file only to append, as each would write over the other."""
    path = f"/proc/{pid}/fd/{STDERR}"
    kind = os.stat(path).st_mode
    if stat.S_ISFIFO(kind) or stat.S_ISCHR(kind) or (stat.S_ISREG(kind) and _flags(pid) & os.O_APPEND):
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOCTTY | os.O_CLOEXEC)
    return None


def _flags(pid: int) -> int:
    with open(f"/proc/{pid}/fdinfo/{STDERR}", encoding="ascii") as file:
        return int(next(line for line in file if line.startswith("flags:")).split()[1], 8)
