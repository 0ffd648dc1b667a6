"""Plain `pytest` ends here: it starts the tests marked `mpi` under mpirun on 1, 2 and 4 ranks,
and shows what failed there.

Eight ranks on two cores are slow, and run with MPITRAIN_LANES=8, as .ci/run does: what only they
show, and with MPITRAIN_EFFORT=all everything.

MPITRAIN_LANES=2,4 starts those lanes only, MPITRAIN_TESTS="comm_* train_zero" only these files.
"""

import re
import shutil
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from conftest import BY_CHOICE, EARLY, LEFT_OUT, LONG
from early_lanes import DEFAULT, LANE, LARGEST, OF_NO_RANK, SIZES, SLOWEST_S, TESTS, asked, hang_limit
from folders import ROOT, SUPPORT
from launch import WITH_GPU, mpirun, preloaded, started, tail

OF_LARGEST = re.compile(rf"\b{LARGEST}\b.* ranks")  # a skip on fewer

HANG = """
def test_one_rank_stays_away(world):
    if world.rank != 1:
        world.Barrier()
    else:
        import time
        time.sleep(10**6)
"""
VOTE = """
from conftest import agree

def test_one_rank_is_wrong(world):
    agree(world, world.rank != 1, "seven is not eight")
"""
RAISE = """
def test_one_rank_raises(world):
    if world.rank == 1:
        raise ValueError("only here")
    world.Barrier()
"""


def lane(num_ranks, *options, cwd=ROOT, timeout=SLOWEST_S):
    """Run the multi-rank tests on `num_ranks` ranks."""
    return mpirun(num_ranks, *preloaded([*LANE, *options]), env=WITH_GPU, cwd=cwd, timeout=timeout)


@pytest.fixture
def project(tmp_path):
    """A project of one test file with this one's settings and fixtures."""

    def write(text):
        shutil.copytree(SUPPORT, tmp_path / "tests" / "support")
        shutil.copy(ROOT / "setup.cfg", tmp_path)
        shutil.copy(SUPPORT.parent / "conftest.py", tmp_path / "tests")
        (tmp_path / "tests" / "test_it.py").write_text(
            "import pytest\n\npytestmark = pytest.mark.mpi\n" + text
        )
        return tmp_path

    return write


# ---------------------------------------------------------------- the lanes themselves


@pytest.fixture(scope="module")
def outcomes():
    """{test: the lanes in which it ran}: filled by the lanes, looked at when they are through."""
    return {}


@pytest.fixture
def early(pytestconfig):
    """The lanes that conftest.py started; None if some tests were chosen."""
    return pytestconfig.stash.get(EARLY, None)


@pytest.mark.parametrize("num_ranks", SIZES)
def test_lane(num_ranks, early, outcomes, tmp_path):
    if early:
        report, done = early.wait(num_ranks)
    else:
        report = tmp_path / "lane.xml"
        done = lane(num_ranks, *hang_limit(), *asked(num_ranks, report))
    assert done.returncode == 0, f"exit code {done.returncode}\n{tail(done.output)}"
    for case in ET.parse(report).iter("testcase"):
        skips = [skip.get("message", "") for skip in case.findall("skipped")]
        if any("does not use mpi" in skip for skip in skips):
            continue
        ran = outcomes.setdefault(f"{case.get('classname')}::{case.get('name')}", [])
        by_choice = any(
            skip.startswith(BY_CHOICE) or (LARGEST not in SIZES and OF_LARGEST.search(skip)) for skip in skips
        )
        ran += [] if skips and not by_choice else [num_ranks]
    left_out = Path(f"{report}{LEFT_OUT}")  # not there if few tests were asked for
    for test in left_out.read_text(encoding="utf-8").splitlines() if left_out.exists() else ():
        file, _, name = test.partition("::")
        outcomes.setdefault(f"{file.removesuffix('.py').replace('/', '.')}::{name}", []).append(num_ranks)


@pytest.mark.parametrize("name", OF_NO_RANK)
def test_serial_tests_of_another_process_passed(name, early):
    if not early:
        pytest.skip("they run in this process")
    _, done = early.wait(name)
    assert done.returncode == 0, f"exit code {done.returncode}\n{tail(done.output)}"


def test_every_multi_rank_test_ran_in_some_lane(request, outcomes):
    """A size or a condition that no lane fulfils would hide a test for ever; a missing device may."""
    through = [
        item.callspec.params["num_ranks"]
        for item in request.session.items
        if getattr(item, "originalname", "") == "test_lane"
    ]
    if not {*DEFAULT} <= {*through} or TESTS != "*":
        pytest.skip("not all lanes were asked for")
    devices = ("gpu", "cuda")
    never = [test for test, ran in outcomes.items() if not ran and not any(word in test for word in devices)]
    assert outcomes and not never, f"skipped on {through} ranks: {never}"


# ----------------------------------------------- what becomes of a test that goes wrong on one rank


@LONG
def test_hang_ends_with_stacks_and_an_exit_code(project):
    done = lane(2, "-o", "faulthandler_timeout=5", "tests", cwd=project(HANG), timeout=60)
    assert done.returncode not in (0, None), tail(done.output)
    assert "test_one_rank_stays_away" in done.output and "Timeout (0:00:05)!" in done.output, tail(
        done.output
    )


def test_hang_limit_of_the_project_is_below_two_minutes(pytestconfig):
    assert 0 < float(pytestconfig.getini("faulthandler_timeout")) <= 110
    assert pytestconfig.getini("faulthandler_exit_on_timeout") is True


def test_vote_of_one_rank_fails_the_lane_with_its_text(project):
    done = lane(2, "tests", cwd=project(VOTE), timeout=60)
    assert done.returncode not in (0, None), tail(done.output)
    assert "rank 1: seven is not eight" in done.output, tail(done.output)
    assert "rank 0:" not in done.output


def test_lone_error_on_one_rank_ends_the_lane_with_its_text(project):
    """What nobody voted on: the others wait for ever in the barrier, until the rank that failed
    takes them down.
    """
    done = lane(2, "tests", cwd=project(RAISE), timeout=60)
    assert done.returncode not in (0, None), tail(done.output)
    assert "ValueError: only here" in done.output and "rank 1" in done.output, tail(done.output)


def test_a_launcher_that_was_killed_is_in_nobodys_way(tmp_path):
    """Open MPI's leaves a folder with its number, and another with that number would not start."""
    with started(
        1, sys.executable, "-c", "import time; print('there', flush=True); time.sleep(10**6)"
    ) as job:
        job.wait_for(lambda: "there" in job.text(), 20)
        number = job.process.pid
        job.kill()
    assert not list(Path(tempfile.gettempdir()).glob(f"*.{number}"))
