"""A file that a command was asked to write: refused before any work if it can't be, written at once."""

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpitrain.cluster.rundir import run_that_has
from mpitrain.errors import ConfigError
from mpitrain.inputs import MATPLOTLIBRC, is_there, load_matplotlib, os_errors_as, shown, write_regular

PICTURES = (".svg", ".png")  # which matplotlib draws


def require_file(
    option: str, out: str, kinds: Sequence[str] = (), others: Iterable[str | None] = (), instead: str = ""
) -> None:
    """Raise ConfigError for a file that can't be written, is of another kind, or belongs to a run.

    others: files that the same command reads or writes; one that is the same is refused, too.
    instead: what to do without matplotlib, where the option can't be left out.
    """
    path = Path(out)
    name = shown(out)
    if kinds:
        instead = instead or ("write a .txt" if ".txt" in kinds else f"leave {option} out")
        _require_kind(f"{option} {name}", path.suffix, kinds, instead)
    if "\0" in out:
        raise ConfigError(f"{option} {name}: found a NUL character, which no file's name has; leave it out")
    with os_errors_as(ConfigError, f"{option} {name}", "choose another name"):  # too long a one
        if path.is_dir() or not path.parent.is_dir():
            fault = "a folder" if path.is_dir() else f"no folder {shown(path.parent)}"
            raise ConfigError(f"{option} {name}: {fault}; needed a file in a folder that exists")
        if path.exists() and not path.is_file():  # to open a FIFO waits for a reader
            raise ConfigError(f"{option} {name}: found a FIFO, a socket or a device; needed a file")
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(
                f"{option} {name}: you may not write to {shown(path.parent)}; needed a folder of yours"
            )
        refuse_file_of_a_run(option, path)
        if any(_is_same(path, Path(other)) for other in others if other):
            raise ConfigError(
                f"{option} {name}: the command reads this file, or writes something else to it; "
                "give another name"
            )


def _is_same(path: Path, other: Path) -> bool:
    """Return whether two names are of one file, which need not be there. Raises OSError."""
    if path.exists() and is_there(other) and other.exists():
        return path.samefile(other)
    return path.absolute() == other.absolute()


def refuse_file_of_a_run(option: str, path: Path) -> None:
    """Raise ConfigError for a file that a run keeps in its directory. Raises OSError."""
    if (run := run_that_has(path)) is not None:
        raise ConfigError(f"{option} {shown(path)}: it belongs to the run in {shown(run)}; give another name")


def _require_kind(where: str, suffix: str, kinds: Sequence[str], instead: str) -> None:
    """Raise ConfigError for another kind, or a picture without matplotlib: do `instead`."""
    if suffix not in kinds:
        raise ConfigError(
            f"{where}: found '{shown(suffix) or 'no file type'}', needed one of {' '.join(kinds)}"
        )
    if suffix not in PICTURES:
        return
    what = f"{where}: matplotlib reads {MATPLOTLIBRC} of the current folder"
    try:
        with os_errors_as(ConfigError, what, "remove it, or change the folder"):
            load_matplotlib()
    except ImportError:
        raise ConfigError(
            f"{where}: pictures need matplotlib; pip install 'mpitrain[plot]', or {instead}"
        ) from None


def as_csv(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Return rows as a CSV below the keys of the first; None and nan are empty."""
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows({key: "" if value != value else value for key, value in row.items()} for row in rows)
    return text.getvalue().encode()


def write(option: str, out: str, content: bytes) -> None:
    """Write a file at once, when all of it is there; after an error it is what it was before.

    Raises ConfigError.
    """
    with os_errors_as(ConfigError, f"{option} {shown(out)}: can't be written"):
        write_regular(Path(out), content)
