"""How much memory is left, as Linux says (proc(5), and control groups of version 2)."""

from pathlib import Path

from mpitrain.inputs import read_text

MOST_BYTES = 1 << 20
LEAST_JUDGED = 1 << 28  # bytes that any node has


def available_bytes() -> int | None:
    """Return how much memory this process can still have, by node and control group; None: unknown."""
    found = [_of_node(), _of_group()]
    return min((each for each in found if each is not None), default=None)


def shortage(needed: int) -> str:
    """Return how much memory is needed and available, if the one is more than the other; else ""."""
    found = available_bytes() if needed > LEAST_JUDGED else None
    if found is None or needed <= found:
        return ""
    return f"{needed / 1e9:,.1f} GB of memory are needed, {found / 1e9:,.1f} GB are available"


def _of_node() -> int | None:
    try:
        lines = read_text("/proc/meminfo", MOST_BYTES).splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _of_group() -> int | None:
    """Return what a job's limit leaves (cgroup v2); a scheduler sets it below the node's memory."""
    try:
        lines = read_text("/proc/self/cgroup", MOST_BYTES).splitlines()
        group = Path("/sys/fs/cgroup" + next(line for line in lines if line.startswith("0::"))[3:])
        most, now = (int(read_text(group / name, MOST_BYTES)) for name in ("memory.max", "memory.current"))
        return most - now
    except (OSError, StopIteration, ValueError):  # "max": no limit
        return None
