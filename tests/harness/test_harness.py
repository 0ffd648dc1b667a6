"""A pytest that is ended, or ends itself, leaves no rank, no file and no shared memory.

One that is only slow continues to its summary.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from conftest import LONG
from effort import cases
from folders import SUPPORT, TESTS
from launch import environment, finished, hear_all, patience, short
from reaper import processes, shared_memory

ENDS = [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP]
TRAINS = """
import os
from launch import MPITRAIN, started, tiny, write_text

def test_a_job_that_runs(tmp_path):
    given = tiny(tmp_path / "run", write_text(tmp_path / "text.txt"), run_steps=10**6)
    with started(2, MPITRAIN, "run", *given) as job:
        job.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 90)
        print("training", flush=True)
        HOW
"""
WAITS = "job.wait(10**6)"
ENDS_ITSELF = "os._exit(1)"
SLOW = """
import subprocess, sys, time
from launch import started

def test_waits_for_a_job_longer_than_the_limit():
    with started(1, sys.executable, "-c", "import time; time.sleep(2 * LIMIT)") as job:
        assert job.wait(60).returncode == 0

def test_computes_longer_than_the_limit():
    time.sleep(1.5 * LIMIT)
"""


@pytest.fixture
def project(tmp_path):
    """Start pytest on a file of tests with this one's harness.

    Its temporary files are in a folder of its own.
    """
    running = []

    def start(text, *options):
        shutil.copy(TESTS / "conftest.py", tmp_path)
        for name in ("effort.py", "folders.py", "launch.py", "preload.py", "reaper.py", "rank_proxy.py"):
            shutil.copy(SUPPORT / name, tmp_path)
        (tmp_path / "test_it.py").write_text(text)
        temporary = tmp_path / "temporary"
        temporary.mkdir()
        env = environment(
            TMPDIR=str(temporary),
            PYTEST_DEBUG_TEMPROOT=str(temporary),
            HARNESS_TEST=str(tmp_path),
            PYTHONPATH=None,
        )
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-s",
            "-o",
            "addopts=",
            "-p",
            "no:cacheprovider",
            *options,
            "test_it.py",
        ]
        how = dict(
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=hear_all,
        )
        running.append(subprocess.Popen(command, cwd=tmp_path, env=env, **how))
        return running[0], temporary

    yield start
    for process in running:
        process.kill()
        process.wait()


def _left(tmp_path):
    """Return the processes that have what only they inherited in their environment."""
    mark = f"HARNESS_TEST={tmp_path}\0".encode()
    return processes(lambda _, given: mark in given)


def _ends(process, tmp_path):
    """Wait until nothing of a pytest is left."""
    limit = time.monotonic() + patience(30)
    while left := [pid for pid in _left(tmp_path) if pid != process.pid] + (
        [] if process.poll() is not None else [process.pid]
    ):
        assert time.monotonic() < limit, [(pid, Path(f"/proc/{pid}/cmdline").read_bytes()) for pid in left]
        time.sleep(0.1)


@pytest.mark.parametrize("number", ENDS[: cases(1, len(ENDS))])
def test_a_signal_that_ends_pytest_ends_its_ranks(project, tmp_path, number):
    process, temporary = project(TRAINS.replace("HOW", WAITS))
    assert any("training" in line for line in process.stdout)
    memory = set().union(*map(shared_memory, _left(tmp_path)))
    process.send_signal(number)
    _ends(process, tmp_path)
    assert not list(temporary.glob("mpitrain-test-*"))
    assert not any(map(os.path.exists, memory))


@LONG
def test_a_pytest_that_ends_itself_leaves_no_rank(project, tmp_path):
    process, temporary = project(TRAINS.replace("HOW", ENDS_ITSELF))
    assert "training" in process.stdout.read()
    _ends(process, tmp_path)
    assert process.returncode == 1 and not list(temporary.glob("mpitrain-test-*"))


def test_a_test_that_starts_mpi_where_ranks_are_started_from_is_named(project, tmp_path):
    process, _ = project("def test_alone():\n    from mpi4py import MPI\n    MPI.COMM_SELF.Dup()\n")
    output, _ = process.communicate(timeout=patience(60))
    assert (
        process.returncode == 3
        and "test_alone has started MPI in the process that starts ranks; mark it mpi" in output
    ), output


@LONG
def test_a_test_that_takes_longer_than_the_limit_shows_its_stacks_and_continues(project, tmp_path):
    """In a wait that has a limit of its own it shows nothing."""
    limit_s = short(2)  # in which a busy machine starts a job
    options = (
        "-o",
        f"faulthandler_timeout={limit_s}",
        "-o",
        "faulthandler_exit_on_timeout=true",
        "-o",
        "tmp_path_retention_policy=failed",
    )
    process, temporary = project(SLOW.replace("LIMIT", str(limit_s)), *options)
    output, _ = process.communicate(timeout=patience(60))
    assert process.returncode == 0 and "2 passed" in output, output
    assert (
        "test_computes_longer_than_the_limit"
        in output.partition(f"Timeout ({timedelta(seconds=limit_s)})!")[2]
    ), output
    assert "test_waits_for_a_job" not in output, output
    _ends(process, tmp_path)
    assert not list(temporary.rglob("*"))


def test_a_limit_grows_with_the_load_and_with_niceness(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    for load, nice, expected in (
        (0.5, 0, 1),
        (0.5, 19, 1),
        (4, 0, 2),
        (4, 3, 1 + 1.25**3),
        (40, 0, 20),
        (6, 19, 20),
    ):
        monkeypatch.setattr(os, "getloadavg", lambda load=load: (load, 0, 0))
        monkeypatch.setattr(os, "nice", lambda _, nice=nice: nice)
        assert patience(10) == pytest.approx(30 * expected)


def test_a_process_that_is_no_job_has_an_end(tmp_path):
    with pytest.raises(subprocess.TimeoutExpired):
        finished([sys.executable, "-c", "import time; time.sleep(10**6)"], timeout=0.1)
