"""A progress bar for what takes more than two seconds: on a terminal's stderr only, and gone when
it is done.
"""

import sys
import threading
from contextlib import suppress

SOON_S = 2.0


class Waiting:
    """Use as a context manager around what may take long, and hand it over to what can tell how far it is."""

    def __init__(self, what: str):
        self._what = what
        self._done = 0
        self._total = 0
        self._bar = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(SOON_S, self._show)
        self._timer.daemon = True

    def __enter__(self) -> "Waiting":
        if sys.stderr.isatty():
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
                self._bar = Bar(
                    TextColumn("{task.description}"),
                    BarColumn(),
                    TimeElapsedColumn(),
                    console=console,
                    transient=True,
                )
                self._bar.add_task(self._what, total=None)
                self._bar.start()
