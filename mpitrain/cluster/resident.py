"""What this process takes of the node's memory, as Linux says (proc(5), /proc/self/status)."""

import os
from pathlib import Path

PAGES = Path("/proc/self/statm")
STATUS = Path("/proc/self/status")
SHARES = Path("/proc/self/smaps_rollup")  # Pss_Shmem: each page divided by its number of processes


def peak_resident() -> int | None:
    """Return the most bytes that were resident and that no file backs; None where nobody says.

    Linux knows the most of all pages (VmHWM), and how many of those that are there are of files
    (RssFile): shared libraries, which all processes of a node have once. Pages of shared memory
    count once a node, too.
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
    try:
        lines = [line.split() for line in SHARES.read_text().splitlines()]
    except OSError:
        return 0
    shares = [int(words[1]) * 1024 for words in lines if words[0] == "Pss_Shmem:"]
    return max(status["RssShmem"] - shares[0], 0) if shares else 0


def _status() -> dict[str, int] | None:
    """Return the counts of pages in bytes."""
    try:
        lines = [line.split() for line in STATUS.read_text().splitlines()]
    except OSError:
        return None
    status = {
        words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("VmHWM", "Rss"))
    }
    return status if {"VmHWM", "RssFile", "RssAnon", "RssShmem"} <= status.keys() else None
