"""What every test shares: a world that is the test's own, and votes instead of lone asserts.

MPI is imported only in ranks that mpirun started. The process that runs plain `pytest` starts mpirun itself, and must not be
an MPI process when it does: both launchers read the environment that MPI_Init leaves behind.
"""

import os
import sys
import tempfile

import pytest

EVERY = os.environ.get("MPITRAIN_LAYOUTS") == "all"  # take every layout, not the few that tell most
EVERY_SIZE = os.environ.get("MPITRAIN_SIZES") == "all"  # of a schedule
MANY = 1000  # tests that take longer than a lane does
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
BESIDE = ("test_lane[1]", "test_lane[2]")
EARLY = pytest.StashKey()
UNDER_MPIRUN = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"))


@pytest.hookimpl(trylast=True)  # the terminal reporter has to be there before it can go
def pytest_configure(config):
    if not UNDER_MPIRUN:
        if INDUCTOR not in os.environ:  # what tests compile is compiled once for all of them, and isn't there the next time
            folder = tempfile.TemporaryDirectory(prefix="mpitrain-test-")
            os.environ[INDUCTOR] = folder.name
            config.add_cleanup(folder.cleanup)
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank:  # rank 0 speaks for all: votes make every rank fail alike
        config.pluginmanager.unregister(name="terminalreporter")
        for plugin in [p for p in config.pluginmanager.get_plugins() if type(p).__name__ == "LogXML"]:
            plugin.logfile = os.devnull  # --junitxml: one file, one writer

    def abort(*error):
        sys.__excepthook__(*error)
        MPI.COMM_WORLD.Abort(1)

    sys.excepthook = abort


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A lone exception on one rank leaves the others waiting: say it on this rank's stderr and take the job down.

    A vote (pytest.fail) is alike on all ranks, and so is a skip; a job of one rank keeps nobody waiting.
    """
    outcome = yield
    error = call.excinfo
    if not UNDER_MPIRUN or error is None or error.errisinstance((pytest.fail.Exception, pytest.skip.Exception, KeyboardInterrupt)):
        return
    from mpi4py import MPI

    if MPI.COMM_WORLD.size > 1:
        sys.__stderr__.write(f"\n{outcome.get_result().longreprtext}\n{item.nodeid} failed on rank {MPI.COMM_WORLD.rank}\n")
        sys.__stderr__.flush()
        MPI.COMM_WORLD.Abort(1)


def pytest_collection_modifyitems(items):
    """After the serial tests come the lanes beside them, the runs of the whole program, and the other lanes; no rank starts them again."""
    size = _num_ranks()
    items.sort(key=_turn)
    for item in items:
        if UNDER_MPIRUN and item.path.name.startswith(("test_run_", "test_lanes")):
            item.add_marker(pytest.mark.skip(reason="starts mpirun itself"))
        sizes = item.get_closest_marker("sizes")
        if size and sizes and size not in sizes.args and not EVERY:
            item.add_marker(pytest.mark.skip(reason=f"{sizes.args} ranks tell"))


def _turn(item):
    """Return when it is a test's turn: 0 with the serial ones, 1 for a lane beside them, 2 with the whole runs, 3 with the other lanes."""
    if item.path.name == "test_lanes.py":
        return 1 if item.name in BESIDE else 3
    return 2 * item.path.name.startswith("test_run_")


def pytest_collection_finish(session):
    """Start the first lane now if there are many tests before it."""
    lanes = [item for item in session.items if item.name in BESIDE]
    if lanes and len(session.items) > MANY and not UNDER_MPIRUN:
        session.config.stash[EARLY] = lanes[0].module.EARLY
        lanes[0].module.EARLY.go_on()


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Start the next one after a test: to start a job ends the limit of the test that runs."""
    yield
    if EARLY in item.config.stash:
        item.config.stash[EARLY].go_on()


def pytest_sessionfinish(session):
    """End what nobody has waited for."""
    if EARLY in session.config.stash:
        session.config.stash[EARLY].end()


def _num_ranks():
    """Return the number of ranks that mpirun started; 0 without it."""
    if not UNDER_MPIRUN:
        return 0
    from mpi4py import MPI

    return MPI.COMM_WORLD.size


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
