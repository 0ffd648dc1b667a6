"""What mpirun starts for a lane.

pytest, as a program that tests/support/preload.py can run with its libraries loaded.

mpirun -n 2 python lane.py --only-mpi -q ...
mpirun -n 2 python lane.py --beside --only-mpi -q ...        takes the time of cores that nobody
                                                             else wants
"""

import sys

import pytest
import torch
from low_priority import lower_priority
from mpi4py import MPI

if __name__ == "__main__":
    if sys.argv[1] == "--beside":
        del sys.argv[1]
        lower_priority()
    torch.set_num_threads(1)  # which is what it takes where mpirun starts it
    if not MPI.Is_initialized():  # where mpitrain was loaded before
        MPI.Init_thread()
        for comm in (MPI.COMM_WORLD, MPI.COMM_SELF):
            comm.Set_errhandler(MPI.ERRORS_RETURN)
    ended = pytest.main(sys.argv[1:])
    MPI.Finalize()
    sys.exit(ended)
