"""What the C library does with memory that is given back: keep it for the next step.

By default glibc returns each free megabyte to the system, and a step frees thousands:
the kernel clears and maps each page anew (mallopt(3), M_MMAP_THRESHOLD and M_TRIM_THRESHOLD). And
whenever 64 KB are given back, it merges its fast bins, thousands beside Python (M_MXFAST).
"""

import ctypes
import os

# malloc.h
FAST = 1
TRIM_THRESHOLD = -1
MMAP_THRESHOLD = -3
PIECE = 32 << 20  # bytes, the most that glibc allows: larger pieces still go back to the system
KEPT = 1 << 30  # bytes that are free at the end of the heap, and stay
SETTINGS = {FAST: 0, MMAP_THRESHOLD: PIECE, TRIM_THRESHOLD: KEPT}
# by which users say it themselves
VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
TUNABLES = "glibc.malloc."  # and in GLIBC_TUNABLES


def keep_freed_memory() -> bool:
    """Let this process keep what it frees, up to KEPT bytes; return whether it does.
    It doesn't with another C library, or if users chose.
    """
    if any(name in os.environ for name in VARIABLES) or TUNABLES in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and all(mallopt(what, value) for what, value in SETTINGS.items())
