"""How far a command is, on stderr: a bar on a terminal, elsewhere of bytes a line now and then."""

import sys
import threading
import time
from contextlib import suppress

SOON_S = 2.0
LINE_S = 5.0  # between two lines


class ProgressBar:
    """Use as a context manager. num_bytes: of this rank's share; only the first rank speaks."""

    def __init__(self, what: str, num_bytes: int = 0, rank: int = 0):
        self._what = what
        self._done = 0
        self._total = num_bytes
        self._speaks = rank == 0
        self._bar = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(SOON_S, self._show)
        self._timer.daemon = True
        self._begin = self._last = time.monotonic()

    def __enter__(self) -> "ProgressBar":
        if self._speaks and sys.stderr.isatty():
            with suppress(RuntimeError):  # no thread can be started: there is no bar
                self._timer.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._timer = None
            if self._bar is not None:
                self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        """`done` steps of `total` are over; the total may grow."""
        self._done = done
        self._total = total

    def add(self, num_bytes: int) -> None:
        """Take note that so many more bytes are done."""
        self._done += num_bytes
        now = time.monotonic()
        if self._speaks and now - self._last > LINE_S and not sys.stderr.isatty():
            self._last = now
            amount = f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB"
            rate = self._done / (now - self._begin)
            print(f"{self._what}: {amount}, {rate / 1e6:.0f} MB/s", file=sys.stderr, flush=True)

    def _show(self) -> None:
        from rich.console import Console  # here: most commands answer before it would be loaded
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        waiting = self

        class Bar(Progress):
            def get_renderables(self):
                for task in self.task_ids:
                    self.update(task, completed=waiting._done, total=waiting._total or None)
                return super().get_renderables()

        console = Console(stderr=True)
        with self._lock:
            if self._timer is not None and console.is_interactive:
                columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
                self._bar = Bar(*columns, console=console, transient=True)
                self._bar.add_task(self._what, total=None)
                self._bar.start()
