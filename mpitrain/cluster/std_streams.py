"""Standard output and error that a program survives: closed, without a reader, on a full disk."""

import io
import os
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mpitrain.cluster.launch import launcher
from mpitrain.errors import MpitrainError

TERMINALS = ("/dev/pts/", "/dev/tty", "/dev/console")
PROGRAM = re.compile(r"(^|/)(mpitrain|python[\d.]*)$")  # of a rank: options after it are its own
# options with which launchers write something before each line, or to files: of Hydra, of Open MPI
MARKS_LINES = re.compile(
    "-(l|prepend-(rank|pattern)|(out|err)file-pattern)$"
    "|--?(tag-output|timestamp-output|output|output-filename|xml)(=|$)"
)
SIZES = ("COLUMNS", "LINES")  # of the terminal, for the libraries that write to it


class Unread(io.FileIO):
    """A stream nobody has to read: `| head -1` ends nothing, and `error` keeps other errors."""

    error: OSError | None = None
    _is_seen: bool | None = None

    def isatty(self) -> bool:
        """Return whether a user sees this at once: on a terminal, maybe that of the launcher.

        Ranks write to pipes; under Open MPI to terminals, wherever the launcher writes.
        """
        if self._is_seen is None:
            pid = launcher()
            self._is_seen = terminal_of(pid, self.fileno()) is not None if pid else super().isatty()
        return self._is_seen

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = error
            return len(data)


def terminal_of(pid: int, number: int) -> str | None:
    """Return the terminal that a launcher writes to; None if it is none, or it marks each line."""
    try:
        path = os.readlink(f"/proc/{pid}/fd/{number}")
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    program = next((at for at, word in enumerate(words) if at and PROGRAM.search(word)), len(words))
    is_marked = any(MARKS_LINES.match(word) for word in words[:program])
    return path if path.startswith(TERMINALS) and not is_marked else None


def _columns_of(path: str) -> int:
    """Return the columns of a terminal; 0 if it can't be asked."""
    with suppress(OSError):
        terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return os.get_terminal_size(terminal).columns
        finally:
            os.close(terminal)
    return 0


def settle() -> None:
    """Make stdout and stderr safe to write to, once, before anything is written."""
    for name in SIZES:
        # libraries call int() on whatever isdigit() takes, and allocate lines as long
        if not re.fullmatch("[1-9][0-9]{0,3}", os.environ.get(name, "80")):
            del os.environ[name]
    pid = launcher()
    terminal = terminal_of(pid, 1) if pid and "COLUMNS" not in os.environ else None
    if terminal and (columns := _columns_of(terminal)):
        os.environ["COLUMNS"] = str(columns)
    # or the next file that is opened would be what they write to
    while (spare := os.open(os.devnull, os.O_RDWR)) < 3:
        continue
    os.close(spare)
    sys.stdout, sys.stderr = _safe(sys.stdout, 1), _safe(sys.stderr, 2)


def _safe(stream: TextIO | None, number: int) -> TextIO:
    encoding = stream.encoding if stream is not None else "utf-8"
    at_once = number == 2 or (stream is not None and stream.line_buffering)
    raw = io.BufferedWriter(Unread(number, "w", closefd=False))
    return io.TextIOWrapper(raw, encoding, errors="backslashreplace", line_buffering=at_once)


def require_written(stream: TextIO) -> None:
    """Raise MpitrainError if a stream that is read has lost what was written to it."""
    stream.flush()
    raw = getattr(getattr(stream, "buffer", None), "raw", None)
    if isinstance(raw, Unread) and raw.error is not None:
        raise MpitrainError(f"the output can't be written: {raw.error.strerror}; write it elsewhere")
