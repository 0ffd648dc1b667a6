"""What mpirun starts for a lane.

pytest, as a program that tests/support/preload.py can run with its libraries loaded.

mpirun -n 2 python lane.py --only-mpi -q ...
mpirun -n 2 python lane.py --beside --only-mpi -q ...        takes the time of cores that nobody
                                                             else wants
"""

import os
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from mpi4py import MPI


def stay_behind() -> None:
    """Leave the cores to others that want them, all but a few hundredths.

    Who gets nothing at all for a minute runs into its limits.
    """
    os.nice(15)
    with suppress(OSError):  # where Linux divides time between sessions first
        Path("/proc/self/autogroup").write_text("15", encoding="ascii")


if __name__ == "__main__":
    if sys.argv[1] == "--beside":
        del sys.argv[1]
        stay_behind()
    torch.set_num_threads(1)  # which is what it takes where mpirun starts it
    if not MPI.Is_initialized():  # where mpitrain was loaded before
        MPI.Init_thread()
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
    ended = pytest.main(sys.argv[1:])
    MPI.Finalize()
    sys.exit(ended)
