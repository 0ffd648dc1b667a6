"""Read what a user named, or what lies in a run directory: whole files of a stated size at most, never waiting for what isn't a file.

A user's names may be links. A run directory is often somebody else's: a link in it can lead anywhere, and is not followed, nor written
through. And both are quoted in messages: on one line, without what a terminal would obey.
"""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}
PIECE = 1 << 20  # bytes
LONGEST = 300  # characters of anything quoted in a message


def open_file(path: str | Path, most_bytes: int) -> int:
    """Open a regular file and return its descriptor. Raises OSError, whose strerror says what is wrong, for whatever else it is.

    Opening a FIFO waits for a writer, and reading a device can have effects: both are refused before they are opened.
    """
    try:
        require_file(path, most_bytes)
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # O_NONBLOCK: it may have become a FIFO since
    except ValueError:  # NUL, or characters that no file name has
        raise OSError(errno.EINVAL, "no file can have this name") from None
    try:
        require_file(file, most_bytes)
    except OSError:
        os.close(file)
        raise
    return file


def read_file(path: str | Path, most_bytes: int) -> bytes:
    """Return the content of a regular file; OSError as in open_file."""
    with open(open_file(path, most_bytes), "rb", buffering=0) as file:
        pieces, size = [], 0
        while piece := os.read(file.fileno(), PIECE):  # not file.read(), which gives None where /proc says "later"
            pieces.append(piece)
            size += len(piece)
            _require_size(size, most_bytes)  # files in /proc say that they are empty
    return b"".join(pieces)


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return the content of a UTF-8 file, without the mark that Windows puts in front; OSError as in read_file."""
    content = read_file(path, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not a text file in UTF-8 (byte {error.start:,})") from None


def kind_of(path: Path) -> str | None:
    """Return what is at `path` itself, whatever it leads to; None for nothing. Raises OSError."""
    try:
        return KINDS[stat.S_IFMT(path.lstat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that is no link and return its descriptor. Raises OSError for anything else, without waiting for it.

    flags: of os.open(); with O_CREAT it is made if there is none.
    """
    kind = kind_of(path)
    if kind not in (None, "a file"):  # None: open() says what is missing
        raise OSError(errno.EINVAL, f"it is {kind}, needed a regular file", str(path))
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file that is no link, of at most `most_bytes`. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
    _require_size(len(content), most_bytes)
    return content


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name `path` when it is complete and synced; after an error or a kill that is what it was before.

    Raises OSError.
    """
    draft = path.with_name(path.name + ".tmp")
    try:
        draft.unlink(missing_ok=True)  # as a link, it would lead what is written elsewhere
        with open(draft, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the error that is raised says what is wrong
            draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)  # the new name itself is on disk only when the folder is synced
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def is_there(path: str | Path) -> bool:
    """Return whether a name that may also mean something else is that of anything on disk, readable or not."""
    try:
        return os.path.lexists(path)
    except ValueError:
        return False


def require_file(path: str | Path | int, most_bytes: int) -> None:
    """Raise OSError unless it is a file of at most so many bytes. Opens nothing."""
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, f"it is {KINDS.get(stat.S_IFMT(found.st_mode), 'something else')}, needed a file")
    _require_size(found.st_size, most_bytes)


def _require_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes, the most that are read of such a file")


def shown(value: object) -> str:
    """Return text for a message: one line without control characters or broken UTF-8, and cut where it is long."""
    try:
        text = str(value) if isinstance(value, (str, Path, Exception)) else repr(value)
    except (ValueError, RecursionError):  # integers of more than 4,300 digits, lists of lists of lists
        text = f"a {type(value).__name__} too large to print"
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: LONGEST + 1])
    return line if len(text) <= LONGEST else f"{line[:LONGEST]}... ({len(text):,} characters)"
