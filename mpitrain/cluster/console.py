"""Where a watchdog speaks: on the launcher's own standard error, if it is on this node, else its own.

What ranks write goes through the launcher, and may be lost. Open MPI's reads no more once a rank
has ended with an exit code; MPICH's proxy ends when a rank has gone that it was about to
answer in MPI_Init.

Imports little: the watchdog starts in milliseconds.
"""

import os
import select
import stat
import sys
import time

from mpitrain.plan.declared.screen import columns, folded

STDOUT, STDERR = 1, 2
PIECE = 4096  # bytes that a pipe takes at once where it takes any
PATIENCE_S = 2.0  # with a reader who doesn't read: the job is to be ended


class Console:
    """launchers: the descriptor of stderr_of_launcher()."""

    def __init__(self, launchers: int | None = None):
        self._launchers = launchers

    def say(self, text: str) -> None:
        """Write lines, unless nobody reads them: the job is ended all the same."""
        write(STDERR if self._launchers is None else self._launchers, text)

    def close(self) -> None:
        """Let go of what is the launcher's: who reads it waits until nobody has it."""
        if self._launchers is not None:
            os.close(self._launchers)
            self._launchers = None

    def close_own(self) -> None:
        """Keep no launcher waiting for the end of what is said."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for own in (STDOUT, STDERR):
            os.dup2(nowhere, own)
        os.close(nowhere)


def write(descriptor: int, text: str) -> None:
    """Write lines to what may be a pipe that nobody reads, and may not wait for a reader."""
    text = folded(text.rstrip("\n"), _columns(descriptor))
    content = f"{_erasure(descriptor)}{text}\n".encode(errors="replace")
    end = time.monotonic() + PATIENCE_S
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        while content and poll.poll(1000 * max(0.0, end - time.monotonic())):
            try:
                content = content[os.write(descriptor, content[:PIECE]) :]
            except BlockingIOError:  # another process was faster
                time.sleep(0.01)
    except OSError:
        return


def _columns(descriptor: int) -> int:
    """Return the columns of the terminal that shows it; 0 for a file, or if there is none."""
    try:
        return os.get_terminal_size(descriptor).columns
    except OSError:  # a file; or the launcher's pipe, which may lead to a terminal
        return 0 if stat.S_ISREG(os.fstat(descriptor).st_mode) else columns(sys.stderr)


def _erasure(descriptor: int) -> str:
    """Return what removes the live line of a step from a terminal."""
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    is_seen = os.isatty(descriptor) or (not is_file and sys.stderr.isatty())
    return "\r\x1b[K" if is_seen and os.environ.get("TERM", "dumb") != "dumb" else ""
