"""Lanes that run beside other tests: starts of pytest on 1, 2 and 4 ranks, and one of no rank.

MPITRAIN_LANES=2,8 starts those lanes only, MPITRAIN_TESTS="comm_* train_zero" only these files.
"""

import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import folders
from conftest import EVERY as EVERY_LAYOUT
from launch import WITH_GPU, patience, preloaded, started

DEFAULT = (1, 2, 4)
LARGEST = 8  # on two cores slow, and by choice
NO_RANK = 0
# what the lane of no rank takes, which is a pytest of its own: nothing that a busy core makes fail
OF_UNIT = ("checkpoint", "commands", "kernels", "model", "optim", "plan", "schedules", "tree", "weights")
OF_RUNS = ("checkpoint_save", "ckpt_commands", "help", "job_command", "layering", "without_mpi")
APART = [folders.TESTS / "unit" / room for room in OF_UNIT]
APART += [folders.TESTS / "runs" / f"test_{name}.py" for name in OF_RUNS]
SIZES = (*DEFAULT, LARGEST) if EVERY_LAYOUT else DEFAULT
if "MPITRAIN_LANES" in os.environ:
    SIZES = tuple(map(int, os.environ["MPITRAIN_LANES"].split(",")))
OF_RANKS = ("ranks", "hardware")
TESTS = os.environ.get("MPITRAIN_TESTS", "*")
SLOWEST_S = 900
LIMIT_S = 100  # as in setup.cfg
LANE = (sys.executable, str(folders.SUPPORT / "lane.py"), "--only-mpi", "-p", "no:cacheprovider", "-q")


def hang_limit(seconds=None):
    """Return the options for the limit of a test on ranks: the project's is of an idle machine."""
    return "-o", f"faulthandler_timeout={seconds or patience(LIMIT_S):.0f}"


def asked(num_ranks, report):
    """Return the options of a lane: what is to be told, and its files."""
    found = [
        path
        for name in TESTS.split()
        for path in folders.files_of_tests(name)
        if path.parent.name in OF_RANKS
    ]
    # the others take seconds to skip
    files = [str(path) for path in found if "pytest.mark.mpi" in path.read_text(encoding="utf-8")]
    assert files, f"MPITRAIN_TESTS={TESTS!r}: no such files"
    chosen = ("-m", "not few_ranks") if num_ranks == LARGEST and TESTS == "*" and not EVERY_LAYOUT else ()
    return "-rfE", f"--junitxml={report}", *chosen, *files


class EarlyLanes:
    """Lanes beside other tests, in the time that these leave of the cores: most runs wait at times.

    That of no rank takes its whole time; the others come one after the other.
    """

    def __init__(self):
        self.jobs = {}
        self._waiting = [*SIZES]
        self._stack = ExitStack()
        self._start(NO_RANK)

    def go_on(self):
        """Start the next lane of ranks, unless one is running."""
        running = (job for size, (_, job) in self.jobs.items() if size != NO_RANK)
        if self._waiting and all(job.process.poll() is not None for job in running):
            self._start(self._waiting.pop(0))

    def _start(self, num_ranks):
        report = (
            Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mpitrain-test-"))) / "lane.xml"
        )
        if num_ranks == NO_RANK:
            program = folders.SUPPORT / "behind.py"
            command = [sys.executable, str(program), *LANE[3:], "-rfE", *map(str, APART)]
        else:
            behind = ("--beside", *hang_limit(patience(SLOWEST_S)))
            command = preloaded([*LANE[:2], *behind, *LANE[2:], *asked(num_ranks, report)])
        self.jobs[num_ranks] = (
            report,
            self._stack.enter_context(started(num_ranks, *command, env=WITH_GPU, cwd=folders.ROOT)),
        )

    def wait(self, num_ranks):
        """Return the report of a lane and how it ended."""
        while num_ranks not in self.jobs:
            list(self.jobs.values())[-1][1].wait(SLOWEST_S)
            self.go_on()
        report, job = self.jobs[num_ranks]
        return report, job.wait(SLOWEST_S)

    def end(self):
        self._stack.close()
