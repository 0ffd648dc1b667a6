"""The files of a corpus, in the same order on every machine, and everything that can be wrong with them."""

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import xxhash

from mpitrain.errors import DataError
from mpitrain.inputs import require_file, shown

MOST_BYTES = {"python-stdlib": 1 << 30, "text": 1 << 32, "jsonl": 1 << 50}  # of a file: a document is in memory at once

SUFFIX = {"python-stdlib": ".py", "text": "", "jsonl": ".jsonl"}  # of the files that are read when a folder is given
SOURCES = tuple(SUFFIX)

# Tests hold odd encodings on purpose; installed packages and customisation differ from machine to machine.
STDLIB_WITHOUT = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "sitecustomize.py", "usercustomize.py"}


def check_source(source: str, path: str | Path | None) -> None:
    """Raise DataError unless the corpus exists, may be read and is not empty. Opens no file and writes nothing."""
    sizes = []
    for _, file in list_files(source, path):
        sizes.append(_stat(file).st_size)
        try:
            require_file(file, MOST_BYTES[source])
        except OSError as error:
            raise unreadable(file, error.strerror) from error
        if not os.access(file, os.R_OK):
            raise unreadable(file, "permission denied")
    if not any(sizes):
        raise no_text(source, path)


def list_files(source: str, path: str | Path | None) -> list[tuple[str, Path]]:
    """Return (name, file) for every file of the corpus, sorted by name. Hidden files and folders are left out."""
    root = _root(source, path)
    if root.is_file():
        return [(root.name, root)]
    is_left_out = _is_no_stdlib_source if source == "python-stdlib" else _is_hidden
    try:
        files = [(file.relative_to(root).as_posix(), file) for file in _walk(root, is_left_out) if file.name.endswith(SUFFIX[source])]
    except RecursionError:  # os.walk, before Python 3.12
        raise unreadable(root, "folders within folders, too deep") from None
    if not files:
        raise no_text(source, path)
    return sorted(files)


def fingerprint(source: str, path: str | Path | None) -> str:
    """Digest the names, sizes and times of the files: it changes when the corpus does, and no file has to be read."""
    digest = xxhash.xxh3_128()
    for name, file in list_files(source, path):
        stat = _stat(file)
        digest.update(os.fsencode(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\0"))
    return digest.hexdigest()


def unreadable(file: str | Path, reason: str) -> DataError:
    return DataError(f"data.path: {shown(file)} cannot be read: {reason}; change data.path or the file")


def no_text(source: str, path: str | Path | None) -> DataError:
    if source == "python-stdlib":
        return DataError(f'{_root(source, path)} holds no text: this Python came without its sources; use data.source = "text"')
    wanted = "a .jsonl file with text" if source == "jsonl" else "a file with text"
    return DataError(f'data.path = "{shown(path)}" holds no text; put {wanted} there or change data.path')


def _root(source: str, path: str | Path | None) -> Path:
    """Return the file or folder that the two settings mean, or say which of them is wrong."""
    if source not in SOURCES:
        raise DataError(f'data.source = "{shown(source)}" is unknown; use one of {", ".join(SOURCES)}')
    if source == "python-stdlib":
        if path:
            found = f'data.path = "{shown(path)}"'
            raise DataError(f'{found} has no use with data.source = "python-stdlib"; use data.source = "text" or "jsonl"')
        return Path(sysconfig.get_path("stdlib"))
    if not path:
        raise DataError(f'data.source = "{source}" needs data.path; set it to a file or a folder')
    root = Path(path)
    _stat(root)
    if not root.is_file() and not root.is_dir():
        raise DataError(f'data.path = "{shown(path)}" is neither a file nor a folder; set it to one')
    return root


def _walk(root: Path, is_left_out: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the files below `root`: regular ones, links to them, and broken links, so that reading them gives an error."""

    def refuse(error: OSError):
        raise unreadable(error.filename, error.strerror) from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = [name for name in folders if not is_left_out(name)]  # os.walk goes only where this list still says
        paths = (os.path.join(folder, name) for name in names if not is_left_out(name))
        yield from (Path(path) for path in paths if os.path.isfile(path) or not os.path.exists(path))


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_no_stdlib_source(name: str) -> bool:
    """True for what not every installation of this Python has; _sysconfigdata and config-* are written for one machine."""
    return name in STDLIB_WITHOUT or name.startswith((".", "_sysconfigdata", "config-"))


def _stat(file: Path) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        raise unreadable(file, error.strerror) from error
    except ValueError:  # NUL
        raise unreadable(file, "no file can have this name") from None
