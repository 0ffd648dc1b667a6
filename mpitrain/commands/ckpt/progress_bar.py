"""How far a command is: a bar on a terminal, else a line now and then; on stderr, and of the first rank."""

import sys
import time

from mpitrain.commands.waiting import Waiting

LINE_S = 5.0  # between two lines


class ProgressBar:
    """Use as a context manager. what: is done; total: bytes of this rank's share."""

    def __init__(self, what: str, total: int, rank: int):
        self._what = what
        self._total = total
        self._speaks = rank == 0
        self._bar = Waiting(what) if self._speaks and sys.stderr.isatty() else None
        self._done = 0
        self._begin = time.monotonic()
        self._last = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        if self._bar is not None:
            self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.__exit__(*error)

    def add(self, num_bytes: int) -> None:
        """Take note that so many more bytes are done."""
        self._done += num_bytes
        now = time.monotonic()
        if self._bar is not None:
            self._bar(self._done, self._total)
        elif self._speaks and now - self._last > LINE_S:
            self._last = now
            rate = self._done / (now - self._begin)
            sys.stderr.write(
                f"{self._what}: {self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {rate / 1e6:.0f} MB/s\n"
            )
            sys.stderr.flush()
