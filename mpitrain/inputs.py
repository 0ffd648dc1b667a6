"""Read what a user named, or what lies in a run directory: files of a stated size at most.

A user's names may be links. A run directory is often somebody else's: a link in it is not followed,
nor written through, also one that is put there during a run. Nothing waits for what isn't a file,
and both are quoted in messages on one line, without what a terminal would obey.

    open_file, read_file, read_text        what a user names
    open_regular, read_regular, replacing  a file of a run directory; a test holds that nothing else
                                           opens one
"""

import errno
import io
import os
import shlex
import stat
import unicodedata
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol, TypeVar

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
MATPLOTLIBRC = "matplotlibrc"
MOST_MATPLOTLIBRC = 1 << 20  # bytes; its own has 40 KB
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
# O_PATH: of Linux; needs no right to list it
FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_CLOEXEC
UNSHOWN = {"Cs", "Zl", "Zp"}  # of Unicode: halves of pairs, separators of lines and paragraphs
CONTROL = UNSHOWN | {"Cc"}  # and control characters
# embeddings, overrides and isolates of direction
TURNS = frozenset(map(chr, (*range(0x202A, 0x202F), *range(0x2066, 0x206A))))
DRAFT = ".tmp"  # ends the name of a file that is being written
LONGEST = 300  # characters of anything quoted in a message


def open_file(path: str | Path, most_bytes: int) -> int:
    """Open a regular file and return its descriptor. Raises OSError for whatever else it is.

    Opening a FIFO waits, and reading a device can have effects: both are refused before.
    """
    try:
        require_file(path, most_bytes)
        # O_NONBLOCK: it may have become a FIFO since
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
        return _content(file.fileno(), most_bytes)


def _content(descriptor: int, most_bytes: int) -> bytes:
    pieces = []
    size = 0
    # not file.read(), which gives None where /proc says "later"
    while piece := os.read(descriptor, PIECE):
        pieces.append(piece)
        size += len(piece)
        _require_size(size, most_bytes)  # files in /proc say that they are empty, and others grow
    return b"".join(pieces)


def read_text(path: str | Path, most_bytes: int) -> str:
    """Return the content of a UTF-8 file, without Windows' mark. OSError as in read_file."""
    content = read_file(path, most_bytes)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"not a text file in UTF-8 (byte {error.start:,})") from None


def load_matplotlib() -> None:
    """Import matplotlib with its default settings. Raises ImportError without it.

    It reads ./matplotlibrc, maybe a stranger's: that could have LaTeX set the letters, and warnings
    quote it as it stands. Raises OSError if that isn't a text file.
    """
    import logging

    if Path(MATPLOTLIBRC).exists() and not Path(MATPLOTLIBRC).is_dir():
        require_file(MATPLOTLIBRC, MOST_MATPLOTLIBRC)
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    try:
        import matplotlib
    except UnicodeDecodeError:
        raise OSError(errno.EINVAL, "it isn't UTF-8") from None
    matplotlib.rcdefaults()


def rendered(figure: "Figure", kind: str, dpi: int = 150) -> bytes:
    """Return a figure as an .svg or .png file. The same figure gives the same bytes."""
    from matplotlib import rc_context

    content = io.BytesIO()
    with rc_context({"svg.hashsalt": "mpitrain", "svg.fonttype": "none"}):  # text stays text
        metadata = {"Date": None} if kind == "svg" else None
        figure.savefig(content, format=kind, dpi=dpi, metadata=metadata)
    return content.getvalue()


def kind_of(path: Path) -> str | None:
    """Return what is at `path` itself, whatever it leads to; None for nothing. Raises OSError."""
    try:
        return KINDS[stat.S_IFMT(path.lstat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None


# ------------------------------------------------------------- files of a run directory, by whoever


@contextmanager
def folder_of(path: Path, own: int = 1) -> Iterator[tuple[int, str]]:
    """Yield a descriptor of the folder of `path`, and its name there, for dir_fd. Raises OSError.

    own: how many names at the end of the path are a run's own: no folder among them may be a link.
    While the descriptor is held, nobody can put another folder in its place.
    """
    names = path.relative_to(path.anchor).parts[-own:]
    if not names:
        raise OSError(errno.EINVAL, "it is no name of a file", str(path))
    place = path.parents[len(names) - 1]
    descriptor = os.open(place, FOLDER)
    try:
        for name in names[:-1]:
            place /= name
            inner = _open_folder(descriptor, name, place)
            os.close(descriptor)
            descriptor = inner
        yield descriptor, names[-1]
    finally:
        os.close(descriptor)


def _kind_in(folder: int, name: str) -> str | None:
    """Return what has a name in an open folder. Raises OSError."""
    return KINDS.get(stat.S_IFMT(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode))


def _open_folder(folder: int, name: str, path: Path) -> int:
    kind = _kind_in(folder, name)
    if kind != "a folder":
        raise OSError(errno.ENOTDIR, f"{shown(path.name)} is {kind}, needed a folder", str(path))
    return os.open(name, FOLDER | os.O_NOFOLLOW, dir_fd=folder)


def open_regular(path: Path, flags: int = os.O_RDONLY, own: int = 1) -> int:
    """Open a regular file of a run directory; return its descriptor. Raises OSError for all else.

    flags: of os.open(); with O_CREAT it is made if there is none.  own: as folder_of() has it.
    """
    with folder_of(path, own) as (folder, name):
        try:
            kind = _kind_in(folder, name)
        except FileNotFoundError:
            kind = None  # open() says what is missing, or makes it
        if kind not in (None, "a file"):
            raise OSError(errno.EINVAL, f"it is {kind}, needed a regular file", str(path))
        try:
            descriptor = os.open(
                name, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666, dir_fd=folder
            )
        except OSError as error:
            error.filename = str(path)
            raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return descriptor


def append_lines(path: Path, lines: bytes) -> None:
    """Append lines to a run directory's file; after a torn line begin a new one. Raises OSError."""
    descriptor = open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT)
    with open(descriptor, "ab", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        file.write(b"\n" * is_torn + lines)


def read_regular(path: Path, most_bytes: int, own: int = 1) -> bytes:
    """Return the content of a file of a run directory. Raises OSError.  own: of folder_of()."""
    with open(open_regular(path, own=own), "rb", buffering=0) as file:
        _require_size(os.fstat(file.fileno()).st_size, most_bytes)
        return _content(file.fileno(), most_bytes)


def make_folder(path: Path, own: int = 1) -> None:
    """Make a folder of a run directory. Raises OSError, also if it exists.  own: of folder_of()."""
    with folder_of(path, own) as (folder, name):
        os.mkdir(name, dir_fd=folder)


def names_in(path: Path) -> list[tuple[str, bool]]:
    """Return a folder's names, and whether each leads to a folder. Raises OSError, also for a link."""
    with folder_of(path) as (folder, name):
        inner = _open_folder(folder, name, path)
        readable = _readable(inner)
        try:
            with os.scandir(readable) as entries:
                return [(entry.name, _is_folder(entry)) for entry in entries]
        finally:
            os.close(inner)
            os.close(readable)


def rename(path: Path, name: str, own: int = 1) -> None:
    """Give what is at `path` another name in its folder. Raises OSError.  own: of folder_of()."""
    with folder_of(path, own) as (folder, before):
        os.rename(before, name, src_dir_fd=folder, dst_dir_fd=folder)


def remove(path: Path, own: int = 1) -> None:
    """Remove what is at `path`, a folder with its content, a link alone. Raises OSError.
    own: of folder_of().
    """
    with folder_of(path, own) as (folder, name):
        try:
            if _kind_in(folder, name) == "a folder":
                import shutil  # --help removes nothing

                shutil.rmtree(name, dir_fd=folder)
            else:
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return


def sync_folder(path: Path) -> None:
    """Bring the names in a folder to the disk: a synced file may still be without one. Raises OSError."""
    _sync(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _sync(descriptor: int) -> None:
    """Bring the names in an open folder to the disk, and close it."""
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, own: int = 1) -> Iterator[BinaryIO]:
    """Yield a new file that takes the name `path` when it is complete and synced. Raises OSError.

    After a kill, or an error while it is written, that is what it was before. Where the folder
    can't be synced then, a new name is removed again; a replaced file stays the new one.
    own: of folder_of().
    """
    draft = path.with_name(path.name + DRAFT)

    def opener(_: str, flags: int) -> int:
        return os.open(draft.name, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)

    with folder_of(path, own) as (folder, name):
        is_new = kind_of(path) is None
        try:
            remove_link(folder, draft.name)  # as a link, it would lead what is written elsewhere
            with open(draft, "xb", opener=opener) as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft.name, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(OSError):  # the error that is raised says what is wrong
                remove_link(folder, draft.name)
            raise
        try:
            _sync(_readable(folder))  # the new name itself is on disk only then
        except OSError:
            if is_new:
                with suppress(OSError):
                    remove_link(folder, name)
            raise


def write_regular(path: Path, content: bytes) -> None:
    """Write a file of a run directory whole, as replacing() does. Raises OSError."""
    with replacing(path) as file:
        file.write(content)


def remove_link(folder: int, name: str) -> None:
    """Remove a name that isn't a folder's from an open folder, if it is there. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _readable(folder: int) -> int:
    """Return a descriptor of an open folder that does more than find names."""
    return os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)


def _is_folder(entry: os.DirEntry) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that leads back to itself
        return False


class Closeable(Protocol):
    def close(self) -> None: ...


@contextmanager
def closed_on_error(opened: Closeable) -> Iterator[None]:
    """Close what is open if the block raises."""
    try:
        yield
    except BaseException:
        opened.close()
        raise


# ---------------------------------------------------------------- what is said of them


@contextmanager
def os_errors_as(kind: type[Exception], what: str, advice: str = "") -> Iterator[None]:
    """Raise an error of `kind` for an OSError: what can't be done, the system's reason, what to change."""
    try:
        yield
    except OSError as error:
        why = shown(error.strerror or "can't be read")
        raise kind(f"{what}: {why}" + f"; {advice}" * bool(advice)) from error


def is_there(path: str | Path) -> bool:
    """Return whether a name that may mean something else is on disk, readable or not."""
    with suppress(ValueError):
        return os.path.lexists(path)
    return False


def require_file(path: str | Path | int, most_bytes: int) -> None:
    """Raise OSError unless it is a file of at most so many bytes. Opens nothing."""
    status = os.stat(path)
    name = None if isinstance(path, int) else str(path)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(status.st_mode):
        kind = KINDS.get(stat.S_IFMT(status.st_mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, needed a file", name)
    _require_size(status.st_size, most_bytes)


def _require_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        why = f"it has more than {most_bytes:,} bytes, the most that are read of such a file"
        raise OSError(errno.EFBIG, why)


def is_one_line(text: str) -> bool:
    """Return whether a name is UTF-8, and one line: no control characters or turns of direction."""
    return not any(unicodedata.category(c) in CONTROL or c in TURNS for c in text)


def obeyed(c: str) -> bool:
    """Return whether a terminal obeys a character: controls, and turns of direction."""
    return (unicodedata.category(c) == "Cc" and c not in "\n\t") or c in TURNS


def printable(text: str) -> str:
    """Return lines for a terminal or a log, without what a terminal would obey."""
    return "".join(ascii(c)[1:-1] if obeyed(c) or unicodedata.category(c) in UNSHOWN else c for c in text)


def as_argument(path: str | Path) -> str:
    """Return a path as a word for a shell, which no command takes for an option."""
    text = str(path)
    return shlex.quote(f"./{text}" if text.startswith("-") else text)


def listed(items: Collection[object], most: int = 8) -> str:
    """Return a list for a message: the first few, and how many more there are."""
    text = ", ".join(shown(item) for item in islice(items, most))
    return text + (f" and {len(items) - most:,} more" if len(items) > most else "")


def decoded(content: bytes, kind: type[T]) -> T:
    """Return what JSON of a stranger means. Raises ValueError that says what is wrong in one line."""
    import msgspec  # --help reads no such file

    try:
        return msgspec.json.decode(content, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: also no UTF-8
        raise ValueError(shown(error)) from None


def shown(value: object) -> str:
    """Return one line for a message, without control characters or broken UTF-8, cut if long."""
    try:
        text = str(value) if isinstance(value, (str, Path, Exception)) else repr(value)
    except (ValueError, RecursionError):  # an integer of 4,301 digits, lists of lists of lists
        text = f"a {type(value).__name__} too large to print"
    line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: LONGEST + 1])
    return line if len(text) <= LONGEST else f"{line[:LONGEST]}... ({len(text):,} characters)"
