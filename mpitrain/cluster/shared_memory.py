"""Files that MPI left in shared memory when its processes were killed.

They fill memory until somebody removes them.

Standard library only.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path("/dev/shm")
# of MPICH, Open MPI 5 and 4, UCX
PREFIXES = ("mpich_shm_", "sm_segment.", "vader_segment.", "ucx_shm_")
BYTES_OF_A_RANK = 6 << 20  # MPICH 5.0.2 takes 5.4 MB of each in MPI_Init, Open MPI 5.0.11 0.1 MB
YOUNG_S = 60.0  # a job that just starts has made a file before everybody has it


def left_behind(folder: Path = FOLDER) -> list[Path]:
    """Return files in `folder` that an MPI library made for this user, a minute ago or more, and
    that no process has in its memory.

    Sees processes of this host and container only, and of others than this user's none, as the
    kernel shows them.
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
    """Say so if `free` bytes are too little for MPI_Init of so many ranks on one node.

    A page that isn't there is SIGBUS, and no error.
    """
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
    text = (
        f"{room.f_bavail * room.f_frsize / 1e9:.1f} of {room.f_blocks * room.f_frsize / 1e9:.1f} GB free in "
        f"{folder}"
    )
    if not (files := left_behind(folder)):
        return text
    num_bytes = sum(map(_size, files))
    names = " -o ".join(
        f"-name '{prefix}*'" for prefix in PREFIXES if any(path.name.startswith(prefix) for path in files)
    )
    count = f"{len(files):,} file{'s' if len(files) > 1 else ''}"
    text += f"; {count} ({num_bytes / 1e9:.2g} GB) were left by killed jobs"
    remove = rf"find {folder} -user {os.getuid()} \( {names} \) -delete"
    return f"{text}; remove them when none of yours runs here:\n  {remove}"


def _made_by_mpi(folder: Path) -> Iterator[Path]:
    try:
        with os.scandir(folder) as entries:
            yield from (
                Path(entry.path)
                for entry in entries
                if entry.name.startswith(PREFIXES) and entry.is_file(follow_symlinks=False)
            )
    except OSError:
        return


def _is_old(path: Path) -> bool:
    try:
        status = path.stat()
    except OSError:  # its job has ended just now
        return False
    return status.st_uid == os.getuid() and time.time() - status.st_mtime > YOUNG_S


def _mapped(maps: Path, folder: bytes) -> Iterator[str]:
    """Yield the names of files below `folder` that a process has in its memory."""
    try:
        content = maps.read_bytes()
    except OSError:  # it has ended, or is somebody else's
        return
    for line in content.splitlines():
        if folder in line:
            yield os.fsdecode(line.partition(folder)[2])


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0
