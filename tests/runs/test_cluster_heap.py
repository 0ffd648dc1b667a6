"""Freed memory stays with the process, so that the next step doesn't take it page by page.

users' own settings stand.
"""

import os
import platform
import subprocess
import sys

import pytest
from conftest import LONG
from effort import cases

from mpitrain.cluster.heap import VARIABLES

# of 4 KB in a megabyte
PAGES = 256
TURNS = 40
PROGRAM = f"""
import resource, sys, torch
from mpitrain.cluster.heap import keep_freed_memory

kept = keep_freed_memory() if sys.argv[1] == "settled" else None
def turns(count):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(count):
        pieces = [torch.empty({PAGES} * 4096, dtype=torch.uint8).fill_(1) for _ in range(4)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
turns(3)
print(kept, turns({TURNS}))
"""
glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")


def faults(mode, **variables):
    """Run a child process; return what keep_freed_memory said there, and the page faults of TURNS turns."""
    mine = {name: value for name, value in os.environ.items() if name not in (*VARIABLES, "GLIBC_TUNABLES")}
    command = [sys.executable, "-c", PROGRAM, mode]
    said, count = subprocess.run(
        command, env=mine | variables, capture_output=True, text=True, check=True
    ).stdout.split()
    return said, int(count)


@glibc
@LONG
def test_freed_memory_is_kept():
    said, kept = faults("settled")
    # glibc's first choice, which it changes as it goes
    _, given_back = faults("as it is", MALLOC_MMAP_THRESHOLD_="131072")
    assert said == "True"
    assert given_back >= TURNS * 4 * PAGES, "page faults aren't seen"
    # some do once, when the heap is filled otherwise
    assert kept < given_back / 10, "a step takes its memory from the system again"


FREE_AND_FAST = """
import ctypes, sys
from mpitrain.cluster.heap import keep_freed_memory

c = ctypes.CDLL(None)
c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
fields = {"_fields_": [(str(n), ctypes.c_int) for n in range(10)]}
c.mallinfo.restype = type("mallinfo", (ctypes.Structure,), fields)
if sys.argv[1] == "settled":
    keep_freed_memory()
# the list must live: given back beside 64 KB that are free, it would have them all merged
pieces = [c.malloc(40) for _ in range(1000)]
for piece in pieces:
    c.free(piece)
print(getattr(c.mallinfo(), "2"))  # smblks, mallinfo(3)
"""


@glibc
def test_small_free_pieces_are_merged_at_once():
    """Else they are, all together, whenever a step gives 64 KB back."""
    settled, as_it_is = (
        int(subprocess.check_output([sys.executable, "-c", FREE_AND_FAST, mode]))
        for mode in ("settled", "as it is")
    )
    assert as_it_is > 500 and settled < 100  # those from before


CHOSEN = [{"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, *({name: "131072"} for name in VARIABLES)]


@LONG
@pytest.mark.parametrize(
    "variables", CHOSEN[: cases(1, len(CHOSEN))], ids=lambda variables: "".join(variables)
)
def test_what_users_chose_stands(variables):
    assert faults("settled", **variables)[0] == "False"
