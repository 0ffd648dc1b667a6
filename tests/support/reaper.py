"""Ends what a pytest has started and left, however that pytest ended: by itself, by SIGKILL, by a fault.

    python -S -E reaper.py FOLDER          its stdin is a pipe that ends when pytest does

Every process that tests start inherits a mark in its environment; ranks that tests/support/preload.py forks
end with the process that stands for them. What they had mapped in /dev/shm is removed, and FOLDER,
where they have their temporary files.
"""

import os
import re
import select
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from preload import MARK, SESSION_LENGTH

LIMIT_S = 60.0
SHARED_MEMORY = re.compile(rb" (/dev/shm/[^\n]+?)(?: \(deleted\))?$", re.MULTILINE)


def processes(chosen: Callable[[int, bytes], bool]) -> list[int]:
    """Return the processes that are chosen by their number and environment, of those that may be
    looked at.
    """
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if chosen(int(folder.name), (folder / "environ").read_bytes()):
                found.append(int(folder.name))
    return found


def kill(
    which: Callable[[], list[int]], limit_s: float, each_time: Callable[[], object] = lambda: None
) -> list[int]:
    """Kill processes until there is none, and remove the shared memory that was theirs.

    Return those that stay.
    """
    end = time.monotonic() + limit_s
    memory = set[str]()
    while pids := which():
        if time.monotonic() > end:
            return pids
        memory = memory.union(*map(shared_memory, pids))  # first: some end when others do
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        each_time()
        time.sleep(0.01)
    for path in memory:
        with suppress(OSError):  # most are gone: MPI unlinks them when all ranks have them
            os.unlink(path)
    return []


def shared_memory(pid: int) -> set[str]:
    """Return the files in shared memory that a process has mapped."""
    with suppress(OSError):
        return {os.fsdecode(path) for path in SHARED_MEMORY.findall(Path(f"/proc/{pid}/maps").read_bytes())}
    return set()


def _wait_for_the_end(parent: int) -> None:
    """Wait until stdin ends, or the parent does.

    A process that it forked may have the other end of stdin, too.
    """
    ends = select.poll()
    ends.register(sys.stdin, select.POLLIN)
    with suppress(OSError):  # an older Linux, or the parent is gone already
        ends.register(os.pidfd_open(parent), select.POLLIN)
    ends.poll()


def main(folder: str) -> None:
    """Wait for the end of stdin, then end what bears the mark of this pytest."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    mark = f"{MARK}={os.environ[MARK][:SESSION_LENGTH]}".encode()
    _wait_for_the_end(os.getppid())
    kill(lambda: processes(lambda pid, given: mark in given and pid != os.getpid()), LIMIT_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
