"""What a child of comm/device/gpu_probe.py may be told to try.

On a machine without a device, the memory of one is host memory.
"""

import os
import signal
import sys
import time
from pathlib import Path


def host(_):
    """A device whose memory MPI takes."""
    return lambda x: x.copy(), lambda x: x


def asks_for_its_world(argument):
    """The same, after a look at who the child is: alone, and started without a launcher's variables."""
    from mpi4py import MPI

    given = Path("/proc/self/environ").read_text().split("\0")  # MPI's start may have removed them since
    names = sorted(
        line.split("=")[0]
        for line in given
        if line.startswith(("PMI_", "PMIX_RANK", "OMPI_COMM_WORLD", "SLURM_"))
    )
    alone = (MPI.COMM_WORLD.size, MPI.COMM_WORLD.rank) == (1, 0)
    if not alone or names or os.environ.get("OMPI_MCA_KEPT") != argument:
        sys.exit(f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}, told {names}")
    return host(argument)


def crashes(_):
    """A device whose addresses mean nothing to the CPU: what MPI does with one is this."""
    import ctypes

    return lambda x: ctypes.string_at(8), lambda x: x


def aborts(_):
    """An MPI that notices, and ends the process."""
    return lambda x: os.kill(os.getpid(), signal.SIGABRT), lambda x: x


def hangs(path):
    """An MPI that waits for ever, and a grandchild that holds on to the pipe; the file has its number."""
    import subprocess

    Path(path).write_text(str(subprocess.Popen(["sleep", "600"]).pid))
    return lambda x: time.sleep(60), lambda x: x


def comes_wrong(_):
    """A device that isn't where its addresses point: no crash, and other bytes, in large messages only."""

    def get(x):
        return x ^ (len(x) > 1 << 15)

    return lambda x: x.copy(), get


def is_not_there(_):
    """A child that finds no device."""
    raise RuntimeError("no HIP GPUs are available")


def ends_early(_):
    """A child that ends as if all were well, but has tried nothing."""
    sys.exit(0)
