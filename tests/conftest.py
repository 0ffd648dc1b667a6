"""What every test shares: a world that is the test's own, and votes instead of lone asserts.

MPI is imported only in ranks that mpirun started. The process that runs plain `pytest` starts
mpirun itself, and must not be an MPI process when it does: both launchers read the environment that
MPI_Init leaves behind.
"""

import atexit
import gc
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import hypothesis
import pytest
from effort import EVERY, WITH_LONG

LONG = pytest.mark.skipif(
    not WITH_LONG, reason="MPITRAIN_EFFORT=long runs what takes seconds and has a shorter test of its kind"
)
LONG_CASE = pytest.mark.skip(
    reason="MPITRAIN_EFFORT=long runs it; others, some by that choice too, have its values"
)
BY_CHOICE = "MPITRAIN_"  # in the reason of a skip that an environment variable undoes
LEFT_OUT = ".left-out"  # after the name of a lane's report
THINNED = ("unit", "ranks", "hardware")
COMMANDS = ("runs", "pages", "harness")  # start whole commands, under mpirun too
FEW = 3  # cases, all of which are told
ROOT = Path(__file__).parent
MANY = 1000  # tests that take longer than a lane does
INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"
EARLY = pytest.StashKey()
UNDER_MPIRUN = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"))


def but_for(cases, longer):
    """Return cases for parametrize(); those in `longer` run with MPITRAIN_EFFORT=long."""
    assert not [case for case in longer if case not in cases], "no such case"
    if EVERY:
        return [*cases]
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=LONG) if case in longer else case
        for case in cases
    ]


@pytest.hookimpl(trylast=True)  # the terminal reporter has to be there before it can go
def pytest_configure(config):
    _measure_no_time(config)
    if not UNDER_MPIRUN:
        _begin_harness(config)
        return
    from mpi4py import MPI

    from mpitrain.comm.base.world import abort

    # pytest sweeps it at the end, and two ranks would sweep away the same links
    folder = tempfile.mkdtemp(prefix="mpitrain-rank-")
    os.environ["PYTEST_DEBUG_TEMPROOT"] = folder
    atexit.register(shutil.rmtree, folder, ignore_errors=True)  # after what pytest registers
    if MPI.COMM_WORLD.rank:  # rank 0 speaks for all: votes make every rank fail alike
        config.pluginmanager.unregister(name="terminalreporter")
        for plugin in [p for p in config.pluginmanager.get_plugins() if type(p).__name__ == "LogXML"]:
            plugin.logfile = os.devnull  # --junitxml: one file, one writer

    def end(*error):
        sys.__excepthook__(*error)
        abort(1)

    sys.excepthook = end


def pytest_sessionstart(session):
    """Start the first lane: it needs no list of tests, which takes a quarter minute to make."""
    if not UNDER_MPIRUN and _is_whole(session.config):
        from early_lanes import EarlyLanes

        session.config.stash[EARLY] = EarlyLanes()
        session.config.stash[EARLY].go_on()


def _is_whole(config):
    """Return whether all tests are asked for, none chosen by name or mark."""
    chosen = config.option.keyword or config.option.markexpr or config.option.collectonly
    asked = {Path(config.invocation_params.dir, each).resolve() for each in config.args}
    return not chosen and asked in ({ROOT}, {ROOT.parent}) and (ROOT / "harness" / "test_lanes.py").exists()


def _measure_no_time(config):
    """Let no time of an example fail a test; --hypothesis-profile chooses another profile."""
    hypothesis.settings.register_profile(
        "mpitrain", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
    )
    if not config.getoption("--hypothesis-profile", None):
        hypothesis.settings.load_profile("mpitrain")


def _begin_harness(config):
    """Have all that tests start marked, with its temporary files in one folder, and a process that
    ends it whatever becomes of this one.
    """
    import launch
    import reaper

    folder = tempfile.mkdtemp(prefix="mpitrain-test-")
    # tmp_path stays for a look at what failed
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # compiled once for all tests, and gone the next time
    os.environ.setdefault(INDUCTOR, f"{folder}/inductor")
    # else each process compiles and loads a program for each width of vectors, to see whether it can
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
    os.environ[launch.MARK] = uuid.uuid4().hex[: launch.SESSION_LENGTH]
    command = [sys.executable, "-S", "-E", reaper.__file__, folder]
    ended = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    config.add_cleanup(ended.communicate)  # closes its stdin, and waits
    if config.pluginmanager.hasplugin("faulthandler"):
        stderr = os.dup(sys.__stderr__.fileno())  # tests have another one
        launch.HANG_LIMIT.use(float(config.getini("faulthandler_timeout") or 0), stderr)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A lone exception on one rank leaves the others waiting.

    Say it on this rank's stderr and take the job down.

    A vote (pytest.fail) is alike on all ranks, and so is a skip; a job of one rank keeps nobody
    waiting.
    """
    outcome = yield
    error = call.excinfo
    if (
        not UNDER_MPIRUN
        or error is None
        or error.errisinstance((pytest.fail.Exception, pytest.skip.Exception, KeyboardInterrupt))
    ):
        return
    from mpi4py import MPI

    from mpitrain.comm.base.world import abort

    if MPI.COMM_WORLD.size > 1:
        sys.__stderr__.write(
            f"\n{outcome.get_result().longreprtext}\n{item.nodeid} failed on rank {MPI.COMM_WORLD.rank}\n"
        )
        sys.__stderr__.flush()
        abort(1)  # once the launcher has forwarded that


def pytest_collection_modifyitems(config, items):
    """After the serial tests come the runs of the whole program, and the lanes beside them.

    No rank starts them again.
    """
    items.sort(key=_turn)
    many = len(items) > MANY
    left_out = {item: LONG_CASE for item in _thinned(items)} if many and not WITH_LONG else {}
    left_out |= _of_other_sizes(items)
    if UNDER_MPIRUN and many:  # to skip one takes a millisecond on each rank
        gone = {item for item in left_out if _some_lane_has(item)}  # test_lanes.py finds the others
        config.hook.pytest_deselected(items=[*gone])
        items[:] = [item for item in items if item not in gone]
        _say_what_runs_by_choice(
            config, [item for item in gone if BY_CHOICE in left_out[item].kwargs["reason"]]
        )
    for item in items:
        if item in left_out:
            item.add_marker(left_out[item])
        if UNDER_MPIRUN and _room(item) in COMMANDS:
            item.add_marker(pytest.mark.skip(reason="starts mpirun itself"))


def _say_what_runs_by_choice(config, items):
    """Write the names of tests beside a lane's report, one a line."""
    from mpi4py import MPI

    if config.option.xmlpath and MPI.COMM_WORLD.rank == 0:
        Path(f"{config.option.xmlpath}{LEFT_OUT}").write_text(
            "".join(f"{item.nodeid}\n" for item in items), encoding="utf-8"
        )


def _of_other_sizes(items):
    """Return marks for what doesn't run on as many ranks as there are."""
    size = _num_ranks()
    found = {}
    for item in items if size else ():
        tell = _tell(item)
        # what tells on one rank alone has a layout of one; a case that names its size has no other
        if tell and size not in tell and (not EVERY or tell == (1,) or _named(item)):
            by_choice = tell != (1,) and _some_lane_has(item) and not _named(item)
            where = "MPITRAIN_EFFORT=all runs it here; " if by_choice else ""
            found[item] = pytest.mark.skip(reason=f"{where}{tell} ranks tell")
    return found


def _tell(item):
    """Return on how many ranks a test says something; () for any."""
    sizes = item.get_closest_marker("sizes")
    return _named(item) or (sizes.args if sizes else ())


def _named(item):
    """Return (4,) for a case of several ranks with size=4 among its parameters."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    size = params.get("size") if item.get_closest_marker("mpi") else None
    return (size,) if isinstance(size, int) else ()


def _some_lane_has(item):
    tell = _tell(item)
    return not tell or not {*tell}.isdisjoint((1, 2, 4, 8))


def pytest_collection_finish():
    """Leave thousands of tests and libraries out of each garbage collection: a tenth of all time."""
    gc.collect()
    gc.freeze()


def _thinned(items):
    """Return cases that MPITRAIN_EFFORT=long runs.

    Of units and of ranks, others have each of their values; of any test marked few_cases, others are enough.

    Who names a file, or fewer, gets every case.
    """
    from pairwise_cases import once, spread

    tests = {}
    for item in items:
        if hasattr(item, "callspec") and _has_a_lane(item):
            tests.setdefault((item.path, item.originalname), []).append(item)
    found = set()
    for cases in tests.values():
        taken = cases
        if len(cases) > FEW and _room(cases[0]) in THINNED:
            taken = once(cases, lambda item: item.callspec.params)
        if marked := cases[0].get_closest_marker("few_cases"):
            taken = spread([item for item in taken if not _is_by_choice(item)], *marked.args)
        found |= {*cases} - {*taken}
    return found


def _is_by_choice(item):
    """Return whether a case is one of those that take long."""
    return any(BY_CHOICE in mark.kwargs.get("reason", "") for mark in item.iter_markers("skipif"))


def _has_a_lane(item):
    """Return whether a case runs on a number of ranks that its test is marked for."""
    size, sizes = item.callspec.params.get("size"), item.get_closest_marker("sizes")
    return size is None or sizes is None or size in sizes.args


def _turn(item):
    """Return when it is a test's turn: 0 with the serial ones, 1 with the whole runs, 2 with the lanes."""
    return 2 if item.path.name == "test_lanes.py" else int(_room(item) in COMMANDS)


def _room(item):
    """Return the folder of tests/ in which a test is: "unit", "ranks", "runs" ..."""
    below = item.path.relative_to(ROOT).parts if item.path.is_relative_to(ROOT) else ()
    return below[0] if below else ""


def pytest_ignore_collect(collection_path, config):
    """Leave to a lane of its own what it takes of the serial tests."""
    if EARLY in config.stash:
        from early_lanes import APART

        return collection_path in APART or None
    return None


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    """Start the next lane between two tests."""
    yield
    if not UNDER_MPIRUN:
        from launch import HANG_LIMIT

        HANG_LIMIT.end()
    if EARLY in item.config.stash:
        item.config.stash[EARLY].go_on()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Show the stacks of a test that takes long, and let it continue.

    A rank has pytest's own timer, which ends it.
    """
    if not UNDER_MPIRUN:
        from launch import HANG_LIMIT

        HANG_LIMIT.begin()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item):
    """Hold the process that starts ranks free of MPI: both launchers read what it leaves in the
    environment.
    """
    found = None if UNDER_MPIRUN else sys.modules.get("mpi4py.MPI")
    if found is not None and found.Is_initialized():
        pytest.exit(
            f"{item.nodeid} has started MPI in the process that starts ranks; mark it mpi", returncode=3
        )


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
    """A communicator of this test's own: messages left over by a failed test can't be received by
    the next.
    """
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    yield comm
    comm.Free()


def agree(comm, verdict, text=""):
    """Fail on every rank when the verdict of any rank is false.

    A plain assert on one rank leaves the others waiting.
    """
    votes = comm.allgather((bool(verdict), str(text)))
    bad = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(votes) if not ok]
    if bad:
        pytest.fail("\n".join(bad), pytrace=True)
