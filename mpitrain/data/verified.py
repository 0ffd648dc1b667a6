"""What a start knows of prepared tokens without reading them.

Digests are computed when tokens are prepared or copied. A later start takes a file for the same if its
inode, size and time of change are those of then, as git does. Files of another user don't count.

    verified.json    what was verified, and a Stamp of each file
    copies.bin       copies of held-out documents: xxh3-128 of its key and the numbers, then the numbers
    packed.bin       likewise, how many rows each block of packed documents has
    from-LOOKS       of data.tokens: a corpus whose files look so has these tokens
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from msgspec import Meta

from mpitrain.data.origin import ENDS_DTYPE, MOST_BYTES, OWN, write_struct
from mpitrain.inputs import names_in, open_regular, read_regular, replacing

VERIFIED = "verified.json"
COPIES = "copies.bin"
PACKED = "packed.bin"
FROM = "from-"
DIGEST_BYTES = 16
# a later write has another time: clocks of file systems tick in up to 2 s
SETTLED_NS = 2 * 10**9


class Stamp(msgspec.Struct, frozen=True):
    """How a file looks. time: of its last change, in nanoseconds."""

    inode: Annotated[int, Meta(ge=0)]
    size: Annotated[int, Meta(ge=0)]
    time: int


class Verified(msgspec.Struct, frozen=True):
    """facts: what the files were found to be."""

    facts: str
    files: dict[str, Stamp]


def is_noted(folder: Path, facts: str, names: Sequence[str]) -> bool:
    """Return whether these files were found to be so, and look the same since."""
    try:
        noted = msgspec.json.decode(_read_own(folder / VERIFIED, MOST_BYTES), type=Verified)
        now = {name: _stamp(folder / name) for name in names}
    except (OSError, msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return noted == Verified(facts, now)


def note(folder: Path, facts: str, names: Sequence[str]) -> None:
    """Note what files were found to be, if the folder can be written to."""
    with suppress(OSError):
        stamps = {name: _stamp(folder / name, settle=True) for name in names}
        write_struct(folder / VERIFIED, Verified(facts, stamps))


def kept_numbers(folder: Path, name: str, key: str, most: int) -> np.ndarray | None:
    """Return the numbers that keep_numbers() kept; None: unknown. most: that there can be."""
    try:
        content = _read_own(folder / name, DIGEST_BYTES + most * ENDS_DTYPE.itemsize)
    except OSError:
        return None
    digest, numbers = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
    whole = digest == _digest_of(key, numbers)
    return np.frombuffer(numbers, ENDS_DTYPE).astype(np.int64) if whole else None


def keep_numbers(folder: Path, name: str, key: str, numbers: np.ndarray) -> None:
    """Keep numbers for the next start, if the folder can be written to. key: all that they depend on."""
    content = numbers.astype(ENDS_DTYPE).tobytes()
    with suppress(OSError), replacing(folder / name, OWN) as file:
        file.write(_digest_of(key, content) + content)


def folder_from(store: Path, looks: str) -> Path | None:
    """Return the folder of data.tokens with the tokens of a corpus that looks so; None: unknown."""
    with suppress(OSError):
        for name, is_folder in names_in(store):
            if is_folder:
                with suppress(OSError):
                    _read_own(store / name / f"{FROM}{looks}", 0)
                    return store / name
    return None


def note_from(folder: Path, looks: str) -> None:
    """Note that these tokens are those of a corpus that looks so, if the folder can be written to."""
    with suppress(OSError):
        os.close(open_regular(folder / f"{FROM}{looks}", os.O_WRONLY | os.O_CREAT, OWN))


def _digest_of(key: str, numbers: bytes) -> bytes:
    return xxhash.xxh3_128_digest(key.encode() + b"\0" + numbers)


def _read_own(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file of this user. Raises OSError for another's."""
    with open(open_regular(path, own=OWN), "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise PermissionError(f"{path} is another user's")
    return read_regular(path, most_bytes, OWN)


def _stamp(path: Path, settle: bool = False) -> Stamp:
    """Return how a file looks. settle: put the time of a fresh file back, so that every later write shows."""
    with open(open_regular(path, own=OWN), "rb", buffering=0) as file:
        found = os.fstat(file.fileno())
        if settle and time.time_ns() - found.st_mtime_ns < SETTLED_NS:
            os.utime(file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns - SETTLED_NS))
            found = os.fstat(file.fileno())
    return Stamp(found.st_ino, found.st_size, found.st_mtime_ns)
