"""HDF5 files that are created and synced safely, and what went wrong when they are not."""

import ctypes
import errno
import io
import os
import re
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import h5py
import numpy as np
from h5py import h5d, h5p, h5s

from mpitrain.checkpoint.dtypes import to_hdf5
from mpitrain.checkpoint.hdf5_bytes import FILE, ForeignError
from mpitrain.cluster.threads import submitted
from mpitrain.errors import CheckpointError
from mpitrain.inputs import open_regular, shown

# This file format has checksums over all metadata, and every HDF5 since 1.10 (2016, the first with
# virtual datasets) reads it.
FORMAT = ("v110", "v110")
WRITTEN = os.O_RDWR | os.O_CREAT | os.O_TRUNC
STAGING = "run.staging"  # the setting that chooses a directory of the node
DRAIN_BYTES = 1 << 24
SEND_BYTES = 1 << 22  # written since writeback was last started
# Linux has it
SYNC_FILE_RANGE = getattr(ctypes.CDLL(None), "sync_file_range", None)
SYNC_FILE_RANGE_WRITE = 2
INTERMEDIATE_GROUPS = h5p.create(h5p.LINK_CREATE)
INTERMEDIATE_GROUPS.set_create_intermediate_group(True)
ROOM_AT_ONCE = h5p.create(h5p.DATASET_CREATE)
ROOM_AT_ONCE.set_alloc_time(h5d.ALLOC_TIME_EARLY)


class PatientFile:
    """A file for HDF5 to write to, whose errors wait in `error` until HDF5 is done.

    HDF5 doesn't survive a failed write: on a full disk h5py 3.16 (HDF5 2.0) ends the process with a
    segmentation fault while it closes the file. So it only ever sees success, and nothing reaches
    the disk after the first error.
    """

    def __init__(self, file: BinaryIO):
        self.file = file
        self.error: OSError | None = None

    def _attempt(self, action: Callable, *arguments, otherwise: int) -> int:
        if self.error is None:
            try:
                return action(*arguments)
            except OSError as error:
                self.error = error
        return otherwise

    def read(self, *_):
        raise NotImplementedError  # h5py asks for the name, and calls readinto

    def readinto(self, buffer) -> int:
        return self._attempt(self.file.readinto, buffer, otherwise=len(buffer))

    def write(self, buffer) -> int:
        return self._attempt(self.file.write, buffer, otherwise=len(buffer))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._attempt(self.file.seek, offset, whence, otherwise=offset)

    def tell(self) -> int:
        return self._attempt(self.file.tell, otherwise=0)

    def truncate(self, size: int) -> int:
        return self._attempt(self.file.truncate, size, otherwise=size)

    def flush(self) -> None:
        self._attempt(self.file.flush, otherwise=0)


class Filler:
    """Writes arrays into the room that HDF5 has made for them, by a thread, which holds none of
    HDF5's locks meanwhile.

    What is written is sent on its way to the disk soon, so that the sync at the end has little left
    to wait for.
    """

    def __init__(self, descriptor: int):
        self._descriptor = descriptor
        self._pool = ThreadPoolExecutor(1, "mpitrain-write")
        self._writing = deque[Future[int]]()  # where each ends
        self._sent = 0  # up to here writeback has been started

    def add(self, file: h5py.File, name: str, array: np.ndarray) -> None:
        """Make a dataset that lies in one piece, and have the array written there.

        It belongs to the filler until it was waited for.
        """
        kind = to_hdf5(array.dtype)
        space = space_of(array.shape)
        offset = h5d.create(
            file.id, name.encode(), kind, space, ROOM_AT_ONCE, INTERMEDIATE_GROUPS
        ).get_offset()
        if offset is not None:  # there are numbers in it
            self._writing.append(submitted(self._pool, self._write, offset, array))

    def wait(self, ahead: int) -> None:
        """Wait until at most so many arrays are to be written. Raises OSError."""
        while len(self._writing) > ahead:
            end = self._writing.popleft().result()
            if end - self._sent >= SEND_BYTES:
                start_writeback(self._descriptor, self._sent, end - self._sent)
                self._sent = end

    def close(self) -> None:
        """Wait for what is being written, and write no more."""
        self._pool.shutdown(cancel_futures=True)

    def _write(self, offset: int, array: np.ndarray) -> int:
        content = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        while content:
            written = os.pwrite(self._descriptor, content, offset)
            offset = offset + written
            content = content[written:]
        return offset


def start_writeback(descriptor: int, offset: int, num_bytes: int) -> None:
    """Have the system begin to bring these bytes of a file to its disk.

    It waits for nothing, and promises nothing.
    """
    if SYNC_FILE_RANGE is not None:
        SYNC_FILE_RANGE(
            descriptor,
            ctypes.c_int64(offset),
            ctypes.c_int64(num_bytes),
            ctypes.c_uint(SYNC_FILE_RANGE_WRITE),
        )


@contextmanager
def creating(
    path: Path, each: Callable[[str], object] = lambda what: None, synced: bool = True
) -> Iterator[tuple[h5py.File, Filler]]:
    """Yield a new HDF5 file, and what fills it; it is on the disk when the block ends.

    each: called with what is done next.
    Raises OSError.

    synced: or else it is only written; a file of a disk that nobody reads after a crash, in a
    directory that may be everybody's: no link that waits there is followed.
    """
    descriptor = (
        open_regular(path, WRITTEN, FILE)
        if synced
        else open_regular(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    )
    with open(descriptor, "wb+") as raw:
        file = PatientFile(raw)
        with h5py.File(file, "w", libver=FORMAT) as hdf5, closing(Filler(raw.fileno())) as filler:
            yield hdf5, filler
        if file.error:
            raise file.error
        raw.flush()
        if synced:
            each(f"syncing {path}")
            os.fsync(raw.fileno())


def drain(source: Path, target: Path) -> None:
    """Move a file to another file system, in large writes one after the other, and sync it there.

    Raises OSError, and CheckpointError if `source` can't be read.
    """

    def read() -> int:
        with saving(source.parent, STAGING):
            return reading.readinto(buffer)

    written = open_regular(target, WRITTEN, FILE)
    with (
        open(written, "wb", buffering=0) as writing,
        open(open_regular(source), "rb", buffering=0) as reading,
    ):
        buffer = memoryview(bytearray(DRAIN_BYTES))
        while count := read():
            at = 0
            while at < count:
                at += writing.write(buffer[at:count])
            start_writeback(writing.fileno(), writing.tell() - count, count)
        os.fsync(writing.fileno())
    source.unlink()


@contextmanager
def in_memory() -> Iterator[tuple[h5py.File, list[bytes]]]:
    """Yield a new HDF5 file that is in memory only, and a list, which has its bytes when the block ends.

    They are those of a closed file. get_file_image() of an open one clears a flag in the
    superblock; before HDF5 2.0 (h5py 3.16) the checksum there is not computed again, and no HDF5
    program opens the file.
    """
    image = list[bytes]()
    raw = io.BytesIO()
    with h5py.File(raw, "w", libver=FORMAT) as file:
        yield file, image
    image.append(raw.getvalue())


def add_dataset(file: h5py.File, name: str, array: np.ndarray) -> None:
    """Write an array, in C order, as a dataset that lies in one piece.

    HDF5's own calls are faster than h5py's.
    """
    kind = to_hdf5(array.dtype)
    dataset = h5d.create(file.id, name.encode(), kind, space_of(array.shape), None, INTERMEDIATE_GROUPS)
    if array.size:
        dataset.write(h5s.ALL, h5s.ALL, array, kind)


def space_of(shape: tuple[int, ...]) -> h5s.SpaceID:
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def write_bytes(path: Path, content: bytes) -> None:
    with open(open_regular(path, WRITTEN, FILE), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def require_space(folder: Path, num_bytes: int) -> None:
    """Raise OSError unless the file system has room for so many bytes.

    Quotas aren't seen, nor what others write meanwhile.
    """
    space = os.statvfs(folder)
    free = space.f_bavail * space.f_frsize
    if free < num_bytes:
        raise OSError(
            errno.ENOSPC, f"{num_bytes / 1e9:,.3f} GB are needed, {free / 1e9:,.3f} GB are free", str(folder)
        )


@contextmanager
def saving(folder: Path, setting: str = "run.dir") -> Iterator[None]:
    """Turn what the system refuses into a CheckpointError that names the folder, and the setting
    that chose it.
    """
    try:
        yield
    except OSError as error:
        why = f"checkpoint cannot be written: {reason(error)}"
        raise CheckpointError(f"{shown(folder)}: {why}; free some space or change {setting}") from error


def reason(error: Exception) -> str:
    """Return the short reason in an error, fit for a message.

    HDF5 wraps it in a sentence with addresses and times.
    """
    if isinstance(error, ForeignError):
        return shown(error)
    text = str(getattr(error, "strerror", None) or error)
    match = re.search(r"error message = '([^']*)'", text) or re.search(r"\((.*)\)", text, re.DOTALL)
    return shown(match[1] if match else text)
