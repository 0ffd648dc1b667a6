"""What this process takes of the node's memory, as Linux says (proc(5), /proc/self/status)."""

import os
from pathlib import Path

PAGES = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")
SHARES = Path("/proc/self/smaps_rollup")  # Pss_Shmem: each page divided by its number of processes


def peak_resident() -> int | None:
    """Return the most bytes that were resident and that no file backs; None where nobody says.

    Pages of files (shared libraries) and of shared memory count once a node.
    """
    status = _status()
    return None if status is None else status["VmHWM"] - status["RssFile"] - _others_bytes(status)


def resident() -> int | None:
    """Return the bytes that are resident now, anonymous and shared, of no file."""
    status = _status()
    return None if status is None else status["RssAnon"] + status["RssShmem"] - _others_bytes(status)


def anonymous() -> int | None:
    """Return the resident bytes that neither a file nor shared memory backs: one short line to read."""
    try:
        _, every, shared, *_ = PAGES.read_text().split()
    except (OSError, ValueError):
        return None
    return (int(every) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _others_bytes(status: dict[str, int]) -> int:
    """Return the bytes of shared pages that other processes are charged with; 0 where nobody says."""
    shares = _bytes_in(SHARES, ("Pss_Shmem",))
    return max(status["RssShmem"] - shares["Pss_Shmem"], 0) if shares else 0


def _status() -> dict[str, int] | None:
    status = _bytes_in(STATUS, ("VmHWM", "Rss"))
    return status if {"VmHWM", "RssFile", "RssAnon", "RssShmem"} <= status.keys() else None


def _bytes_in(path: Path, names: tuple[str, ...]) -> dict[str, int]:
    """Return the bytes of entries whose names begin so; nothing where there is no such file."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    kept = [words for words in lines if words[0].startswith(names)]
    return {name.rstrip(":"): int(kib) * 1024 for name, kib, *_ in kept}
