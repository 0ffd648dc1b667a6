"""Tables of comma-separated values: metrics.csv, a row a step, and config.csv, a row a key."""

import csv
import io
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mpitrain.inputs import open_regular, replacing
from mpitrain.report.loggers.catalog import LoggedRun

METRICS = "metrics.csv"
FIRST = ["step", "time"]


class CsvLogger:
    """A table with a column a name, empty in rows before it came. A resumed start continues it."""

    def __init__(self, run: LoggedRun):
        self._path = run.folder / METRICS
        self._resumes = run.resumed
        _write(run.folder / "config.csv", [("key", "value"), *run.config.items()])
        if run.resumed:
            _cut(self._path, math.inf)  # no new row may come
            self._open(_columns(self._path))
        else:
            self._begin(FIRST, ())

    @classmethod
    def resumes(cls, run: LoggedRun) -> bool:
        """Return whether an earlier start has left a table."""
        return _columns(run.folder / METRICS)[:2] == FIRST

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        """Add a row."""
        if self._resumes:
            self._resumes = False
            _cut(self._path, step)
        row = {"step": step, "time": time} | dict(values)
        columns = self._rows.fieldnames
        if new := [name for name in row if name not in columns]:
            self._file.close()
            with open(open_regular(self._path), newline="", encoding="utf-8") as file:
                rows = islice(csv.reader(file), 1, None)
                self._begin([*columns, *new], ([*row, *[""] * len(new)] for row in rows))
        self._rows.writerow(row)

    def flush(self) -> None:
        """Bring rows to the disk: a start that resumes isn't given them again."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def end(self) -> None:
        """Close the file."""
        self._file.close()

    def _begin(self, columns: list[str], rows: Iterable[Sequence[str]]) -> None:
        _write(self._path, chain([columns], rows))
        self._open(columns)

    def _open(self, columns: list[str]) -> None:
        descriptor = open_regular(self._path, os.O_WRONLY | os.O_APPEND)
        self._file = os.fdopen(descriptor, "a", newline="", encoding="utf-8")
        self._rows = csv.DictWriter(self._file, columns)


def _columns(path: Path) -> list[str]:
    with (
        suppress(OSError, ValueError, csv.Error),
        open(open_regular(path), newline="", encoding="utf-8") as file,
    ):
        return next(csv.reader(file), [])
    return []


def _cut(path: Path, step: float) -> None:
    """Drop rows from a step on, which a killed logger may have left, and one that it tore."""
    with open(open_regular(path, os.O_RDWR), "r+b") as file:
        end = len(file.readline())
        for line in file:
            if not line.endswith(b"\n") or int(line.partition(b",")[0]) >= step:
                break
            end += len(line)
        file.truncate(end)


def _write(path: Path, rows: Iterable[Sequence[Any]]) -> None:
    with replacing(path) as file:
        text = io.TextIOWrapper(file, "utf-8", errors="backslashreplace", newline="")
        csv.writer(text).writerows(rows)
        text.detach()  # which flushes it, and leaves the file open
