"""Tables of comma-separated values: metrics.csv, a row a step, and config.csv, a row a key."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.inputs import open_regular, replacing
from mpitrain.report.loggers.catalog import LoggedRun

FIRST = ("step", "time")


class CsvLogger:
    """metrics.csv has a column a name; one that comes later is empty in the rows before."""

    def __init__(self, run: LoggedRun):
        self._path = run.folder / "metrics.csv"
        _write(run.folder / "config.csv", [("key", "value"), *run.config.items()])
        self._begin([*FIRST], [])

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add a row."""
        row = {"step": step, "time": time} | dict(values)
        if new := [name for name in row if name not in self._columns]:
            self._file.close()
            with open(open_regular(self._path), newline="", encoding="utf-8") as file:
                _, *rows = csv.reader(file)
            self._begin([*self._columns, *new], [[*row, *[""] * len(new)] for row in rows])
        self._rows.writerow([row.get(name, "") for name in self._columns])

    def flush(self) -> None:
        """Bring rows to the file."""
        self._file.flush()

    def end(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self, columns: list[str], rows: Sequence[Sequence[str]]) -> None:
        self._columns = columns
        _write(self._path, [columns, *rows])
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", newline="", encoding="utf-8")
        self._rows = csv.writer(self._file)


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
        csv.writer(text).writerows(rows)
        text.detach()  # which flushes it, and leaves the file open
