"""What readers of a stranger's files must not do.

Open what lies elsewhere, take all memory, wait for ever, use the library of HDF5.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import h5py
from folders import ROOT
from launch import patience

LIMIT_S = 20
LIMIT_BYTES = 1 << 30


class Hang(BaseException):
    pass


WATCHING: list["Watched"] = []
# there is no way to take one back
sys.addaudithook(lambda event, arguments: [watched.note(event, arguments) for watched in WATCHING])


class Watched:
    """Within the block: files outside of `allowed` that are opened are noted, time and memory are bounded.

    hdf5: whether h5py may be used, as by what writes. A bare name that may be no link is one in a
    folder that is open: it was noted.
    """

    def __init__(self, *allowed: Path, hdf5: bool = False, limit_s: float = LIMIT_S):
        self.hdf5 = hdf5
        self.limit_s = limit_s
        python = (sys.prefix, sys.base_prefix, ROOT, "/proc/self", "/sys/devices", "/dev/null")
        self.allowed = [os.path.realpath(path) for path in (*allowed, *python)]
        self.opened = []

    def __enter__(self):
        WATCHING.append(self)
        self.file, h5py.File = h5py.File, h5py.File if self.hdf5 else None
        self.limit = resource.getrlimit(resource.RLIMIT_AS)
        virtual = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (virtual + LIMIT_BYTES, self.limit[1]))
        signal.signal(signal.SIGALRM, self._hang)
        signal.setitimer(signal.ITIMER_REAL, patience(self.limit_s))
        return self

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, self.limit)
        h5py.File = self.file
        WATCHING.remove(self)

    def note(self, event, arguments):
        if event in ("open", "os.listdir", "os.scandir") and isinstance(
            arguments[0], (str, bytes, os.PathLike)
        ):
            path = os.fsdecode(arguments[0])
            flags = (arguments[2] or 0) if event == "open" else 0
            # which reads nothing, and goes nowhere else
            if flags & os.O_PATH or (os.sep not in path and flags & os.O_NOFOLLOW):
                return
            path = os.path.realpath(path)
            if not any(path == allowed or path.startswith(allowed + os.sep) for allowed in self.allowed):
                self.opened.append(path)

    def _hang(self, *_):
        raise Hang(f"not done after {self.limit_s} s")


def tree(folder):
    """Return what is at every path below a folder, links not followed; of files the size and the
    first bytes.
    """
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[path] = os.readlink(path)
        elif path.is_file():
            with path.open("rb") as file:
                found[path] = path.stat().st_size, file.read(1 << 20)
        else:
            found[path] = path.lstat().st_mode
    return found
