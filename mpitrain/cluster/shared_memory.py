"""Files that MPI left in shared memory when its processes were killed. Standard library only."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = Path("/dev/shm")
# of MPICH, Open MPI 5 and 4, UCX
PREFIXES = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")
BYTES_OF_A_RANK = 6 << 20  # MPICH 5.0.2 takes 5.4 MB of each in MPI_Init, Open MPI 5.0.11 0.1 MB
YOUNG_S = 60.0  # a job that just starts has made a file before everybody has it


def left_behind(folder: Path = FOLDER) -> list[Path]:
    """Return this user's files in `folder` that an MPI has left: of a minute ago, and mapped by none.

    Sees this user's processes of this host and container only.
    """
    stale = [path for path in _made_by_mpi(folder) if _is_old(path)]
    if not stale:
        return []
    mapped = {
        name for maps in Path("/proc").glob("[0-9]*/maps") for name in _mapped(maps, f" {folder}/".encode())
    }
    return sorted(path for path in stale if path.name not in mapped)


def free_bytes(folder: Path = FOLDER) -> int | None:
    """Return how much room there is; None where that can't be known."""
    try:
        room = os.statvfs(folder)
    except OSError:
        return None
    return room.f_bavail * room.f_frsize


def too_little(free: int | None, num_ranks: int, folder: Path = FOLDER) -> str:
    """Say so if `free` bytes are too little for MPI_Init of a node's ranks: they get SIGBUS."""
    needed = num_ranks * BYTES_OF_A_RANK
    if free is None or free >= needed:
        return ""
    return (
        f"{folder} of {os.uname().nodename} had {free / 1e6:,.0f} MB free, and MPI may need "
        f"{needed / 1e6:,.0f} MB there for {num_ranks} ranks: make it larger (docker run --shm-size=1g, or "
        f"mount -o remount,size=1g {folder})"
    )


def describe(folder: Path = FOLDER) -> str:
    """Say how much shared memory there is, and what takes it without use."""
    try:
        room = os.statvfs(folder)
    except OSError as error:
        return f"none: {error}"
    free, whole = (blocks * room.f_frsize / 1e9 for blocks in (room.f_bavail, room.f_blocks))
    text = f"{free:.1f} of {whole:.1f} GB free in {folder}"
    if not (files := left_behind(folder)):
        return text
    num_bytes = sum(map(_size, files))
    known = [path.name for path in files]
    prefixes = [prefix for prefix in PREFIXES if any(name.startswith(prefix) for name in known)]
    names = " -o ".join(f"-name '{prefix}*'" for prefix in prefixes)
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    text += f"; {count} ({num_bytes / 1e9:.2g} GB) were left by killed jobs"
    remove = rf"find {folder} -user {os.getuid()} \( {names} \) -delete"
    return f"{text}; remove them when none of yours runs here:\n  {remove}"


def _made_by_mpi(folder: Path) -> Iterator[Path]:
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIXES) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def _is_old(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:  # its job has ended just now
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_S


def _mapped(maps: Path, folder: bytes) -> Iterator[str]:
    """Yield the names of files below `folder` that a process has in its memory."""
    with suppress(OSError):  # it has ended, or is somebody else's
        for line in maps.read_bytes().splitlines():
            if folder in line:
                yield os.fsdecode(line.partition(folder)[2])


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_blocks * 512
    return 0
