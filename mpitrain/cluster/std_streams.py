"""Standard output and error that a program survives.

Closed ones, a reader that has gone, a full disk, characters they can't take.
"""

import io
import os
import re
import sys
from typing import TextIO

from mpitrain.cluster.launch import launcher
from mpitrain.errors import MpitrainError

SIZES = ("COLUMNS", "LINES")  # of the terminal, for the libraries that write to it


class Unread(io.FileIO):
    """A stream nobody has to read: `| head -1` ends nothing, and other errors are kept for who wants to know.

    Training goes on.
    """

    error: OSError | None = None

    def isatty(self) -> bool:
        """Tell whether a user sees this at once.

        Open MPI's launcher gives ranks a terminal of its own, wherever it writes itself.
        """
        return super().isatty() and _is_the_users(self.fileno())

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except BrokenPipeError:
            return len(data)
        except OSError as error:
            self.error = error
            return len(data)


def _is_the_users(number: int) -> bool:
    pid = launcher()
    try:
        return not pid or os.readlink(f"/proc/{pid}/fd/{number}").startswith(
            ("/dev/pts/", "/dev/tty", "/dev/console")
        )
    except OSError:
        return False


def settle() -> None:
    """Make stdout and stderr safe to write to, once, before anything is written."""
    for name in SIZES:
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(name, "80")):
            # libraries call int() on whatever isdigit() takes, and allocate lines as long
            del os.environ[name]
    # or the next file that is opened would be what they write to
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        continue
    os.close(spare)
    sys.stdout, sys.stderr = _safe(sys.stdout, 1), _safe(sys.stderr, 2)


def _safe(stream: TextIO | None, number: int) -> TextIO:
    encoding = stream.encoding if stream is not None else "utf-8"
    at_once = number == 2 or (stream is not None and stream.line_buffering)
    raw = Unread(number, "w", closefd=False)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, errors="backslashreplace", line_buffering=at_once
    )


def require_written(stream: TextIO) -> None:
    """Raise MpitrainError if a stream has lost what was written to it, other than because nobody wants it."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, Unread) and raw.error is not None:
        raise MpitrainError(f"the output can't be written: {raw.error.strerror}; write it elsewhere")
