"""Lanes that run beside other tests: starts of pytest on 1, 2 and 4 ranks, and three of no rank.

MPITRAIN_LANES=2,8 starts those lanes only, MPITRAIN_TESTS="comm_* train_zero" only these files.
"""

import os
import re
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import folders
from conftest import EVERY as EVERY_LAYOUT
from launch import HANG_LIMIT, WITH_GPU, patience, preloaded, started

DEFAULT = (1, 2, 4)
LARGEST = 8  # on two cores slow, and by choice
UNIT, RUNS = folders.TESTS / "unit", folders.TESTS / "runs"
IN_TIME = re.compile(r"\b(signal|started|short|step_s|import time|s of a core)\b")  # that end or measure
# what lanes of no rank take, which are a pytest of their own each: nothing that a busy core makes fail
OF_NO_RANK = {
    "pages, and runs that nothing ends": [
        folders.TESTS / "pages",
        *(path for path in sorted(RUNS.glob("test_*.py")) if not IN_TIME.search(path.read_text("utf-8"))),
    ],
    "unit/plan, schedules and tree": [UNIT / room for room in ("plan", "schedules", "tree")],
    "other rooms": [
        *(UNIT / room for room in ("checkpoint", "commands", "kernels", "model", "optim", "weights")),
        *(
            RUNS / f"test_{name}.py"
            for name in ("checkpoint_save", "ckpt_commands", "job_command", "without_mpi")
        ),
    ],
}
APART = [path for paths in OF_NO_RANK.values() for path in paths]
AT_ONCE = 2  # lanes, beside the process that starts them
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

    Two at a time. Those of no rank, of one core each and the longest, come first; last comes the largest,
    which keeps all cores busy when nothing else is left.
    """

    def __init__(self):
        self.jobs = {}
        self._waiting = [*OF_NO_RANK, *SIZES]
        self._stack = ExitStack()

    def go_on(self):
        """Start lanes where others have ended."""
        running = sum(job.process.poll() is None for _, job in self.jobs.values())
        for _ in range(AT_ONCE - running):
            if self._waiting:
                self._start(self._waiting.pop(0))

    def _start(self, lane):
        report = (
            Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="mpitrain-test-"))) / "lane.xml"
        )
        if lane in OF_NO_RANK:
            program = folders.SUPPORT / "low_priority.py"
            command = [sys.executable, str(program), *LANE[3:], "-rfE", *map(str, OF_NO_RANK[lane])]
        else:
            options = ("--beside", *hang_limit(patience(SLOWEST_S)))
            command = preloaded([*LANE[:2], *options, *LANE[2:], *asked(lane, report)])
        num_ranks = 0 if lane in OF_NO_RANK else lane
        self.jobs[lane] = (
            report,
            self._stack.enter_context(started(num_ranks, *command, env=WITH_GPU, cwd=folders.ROOT)),
        )

    def wait(self, lane):
        """Return the report of a lane, by its number of ranks or its name, and how it ended.

        Others start meanwhile.
        """
        end = time.monotonic() + patience(SLOWEST_S)
        with HANG_LIMIT.held():
            while self._is_to_end(lane) and time.monotonic() < end:
                time.sleep(0.1)
                self.go_on()
        assert lane in self.jobs, f"lanes {[*self.jobs]} took so long that {lane} could not start"
        report, job = self.jobs[lane]
        return report, job.wait(1)

    def _is_to_end(self, lane):
        return lane not in self.jobs or self.jobs[lane][1].process.poll() is None

    def end(self):
        self._stack.close()
