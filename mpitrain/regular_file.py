"""Files that may come from a stranger: opened only if they are what they seem. At the bottom of the package: imports nothing of ours.

A run directory is often somebody else's. A symbolic link in it can lead anywhere, a FIFO keeps its reader waiting for ever, and opening
a device can do something.
"""

import errno
import os
import stat
from pathlib import Path

KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
    stat.S_IFREG: "a file",
}


def kind_of(path: Path) -> str | None:
    """Return what is at `path` itself, whatever it leads to; None for nothing. Raises OSError."""
    try:
        return KINDS[stat.S_IFMT(path.lstat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None


def open_regular(path: Path) -> int:
    """Open a regular file for reading and return its descriptor. Raises OSError for anything else, without waiting for it."""
    kind = kind_of(path)
    if kind not in (None, "a file"):  # None: open() says what is missing
        raise OSError(errno.EINVAL, f"it is {kind}, needed a regular file", str(path))
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most `most_bytes`. Raises OSError."""
    with open(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", str(path))
    return content


def printable(text: object) -> str:
    """Return a stranger's text for a message: on one line, without what a terminal would obey, and not too long."""
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in str(text)[:1000])
    return safe if len(safe) <= 300 else safe[:300] + "..."
