"""What every test shares: a world that is the test's own, and votes instead of lone asserts.

MPI is imported only in ranks that mpirun started. The process that runs plain `pytest` starts mpirun itself, and must not be
an MPI process when it does: both launchers read the environment that MPI_Init leaves behind.
"""

import os
import sys

import pytest

UNDER_MPIRUN = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"))


@pytest.hookimpl(trylast=True)  # the terminal reporter has to be there before it can go
def pytest_configure(config):
    if not UNDER_MPIRUN:
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank:  # rank 0 speaks for all: votes make every rank fail alike
        config.pluginmanager.unregister(name="terminalreporter")

    def abort(*error):
        sys.__excepthook__(*error)
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = abort


@pytest.fixture
def world():
    """A communicator of this test's own: messages left over by a failed test can't be received by the next."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def agree(comm, verdict, text=""):
    """Fail on every rank when the verdict of any rank is false; a plain assert on one rank leaves the others waiting."""
    votes = comm.allgather((bool(verdict), str(text)))
    bad = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(votes) if not ok]
    if bad:
        pytest.fail("\n".join(bad), pytrace=True)
