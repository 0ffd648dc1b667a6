"""One log for each rank in the run directory (run.logs): its stdout and stderr, whoever writes.

    logs/rank-00000.log  what rank 0 tells, which is on the console as well
    logs/rank-00003.log  warnings of libraries, native ones too; begins anew, under a line with
                         date, node and job, with each start

Launchers have options for this, all different, but can't know the run directory.
"""

import io
import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from mpitrain.cluster.launch import job_of_scheduler
from mpitrain.cluster.std_streams import Unread
from mpitrain.errors import CheckpointError
from mpitrain.inputs import make_folder, open_regular, shown


class Both(Unread):
    """The console, and a log that gets the same; if one can't be written to, the other still is."""

    def __init__(self, number: int, log: int):
        super().__init__(number, "w", closefd=False)
        self._log = Unread(log, "w", closefd=False)

    def write(self, data) -> int:
        self._log.write(data)
        return super().write(data)


class OpenStreams:
    """Standard output and error before begin(), for a rank that may take another one's place."""

    def __init__(self) -> None:
        self._streams = sys.stdout, sys.stderr
        self._descriptors = os.dup(1), os.dup(2)

    def restore(self) -> None:
        """Write there again, and to no log."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for number, descriptor in enumerate(self._descriptors, start=1):
            os.dup2(descriptor, number)
        sys.stdout, sys.stderr = self._streams


def begin(folder: Path, rank: int, num_ranks: int) -> None:
    """Let this rank write to its log from now on, the first one to the console, too.

    Not to a terminal's, which is redrawn all the time. Raises CheckpointError if it can't be made.
    """
    path = folder / f"rank-{rank:05d}.log"
    try:
        with suppress(FileExistsError):
            make_folder(folder)
        log = open_regular(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, own=2)
        os.write(log, _heading(rank, num_ranks).encode(errors="replace"))
    except OSError as error:
        raise CheckpointError(
            f"{shown(path)} cannot be written: {error.strerror}; make room for it, or set run.logs = false"
        ) from None
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if rank:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    elif not sys.stdout.isatty():
        sys.stdout, sys.stderr = _on_both(sys.stdout, 1, log), _on_both(sys.stderr, 2, log)


def _heading(rank: int, num_ranks: int) -> str:
    job = job_of_scheduler()
    of_job = f", job {job}" if job else ""
    when = time.strftime("%Y-%m-%d %H:%M:%S %z")
    where = f"process {os.getpid()} on {socket.gethostname()}"
    return f"---- {when}: rank {rank} of {num_ranks}, {where}{of_job}\n"


def _on_both(stream: TextIO, number: int, log: int) -> TextIO:
    raw = io.BufferedWriter(Both(number, log))
    return io.TextIOWrapper(raw, stream.encoding, errors="backslashreplace", line_buffering=True)
