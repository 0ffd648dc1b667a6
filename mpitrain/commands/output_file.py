"""A file that a command was asked to write: refused before any work if it can't be, written at once."""

import os
from collections.abc import Sequence
from pathlib import Path

from mpitrain.cluster.rundir import run_that_has
from mpitrain.errors import ConfigError
from mpitrain.inputs import MATPLOTLIBRC, load_matplotlib, replacing, shown


def require_file(option: str, out: str, kinds: Sequence[str] = ()) -> None:
    """Raise ConfigError for a file that can't be written, is of another kind, or belongs to a run."""
    path = Path(out)
    name = shown(out)
    if kinds and path.suffix not in kinds:
        raise ConfigError(
            f"{option} {name}: found '{shown(path.suffix) or 'no file type'}', needed one of "
            f"{' '.join(kinds)}"
        )
    if "\0" in out:
        raise ConfigError(f"{option} {name}: found a NUL character, which no file's name has; leave it out")
    try:
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
    except OSError as error:  # too long a name
        raise ConfigError(f"{option} {name}: {error.strerror}; choose another name") from None


def refuse_file_of_a_run(option: str, path: Path) -> None:
    """Raise ConfigError for a file that a run keeps in its directory. Raises OSError."""
    if (run := run_that_has(path)) is not None:
        raise ConfigError(f"{option} {shown(path)}: it belongs to the run in {shown(run)}; give another name")


def require_plotting(out: str, option: str = "--out") -> None:
    """Raise ConfigError where a picture is asked for and matplotlib isn't installed."""
    if Path(out).suffix != ".txt":
        try:
            load_matplotlib()
        except ImportError:
            instead = "write a .txt" if option == "--out" else f"leave {option} out"
            raise ConfigError(
                f"{option} {shown(out)}: pictures need matplotlib; pip install 'mpitrain[plot]', or {instead}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{option} {shown(out)}: matplotlib reads {MATPLOTLIBRC} of the current folder: "
                f"{error.strerror}; remove it, or change the folder"
            ) from None


def write(option: str, out: str, content: bytes) -> None:
    """Write a file at once, when all of it is there; after an error it is what it was before.

    Raises ConfigError.
    """
    try:
        with replacing(Path(out)) as file:
            file.write(content)
    except OSError as error:
        raise ConfigError(f"{option} {shown(out)}: can't be written: {error.strerror}") from None
