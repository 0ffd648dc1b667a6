"""Ranks find the watchdog of their node from their first line.

One for all of a job, which says who is gone before MPI has started.
"""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from conftest import LONG
from launch import environment, patience

from mpitrain.cluster import watchdog, watchdog_rendezvous

GONE = "in phase start, starting: the process is gone"
RANK = """
import sys
from mpitrain.cluster.status_board import LEFT
from mpitrain.cluster.guard import Guard
guard = Guard()
print("there", guard.watchdog.connection is not None, flush=True)
sys.stdin.readline()
guard.place.enter("end", "leaving", LEFT)
"""


class NodesJob:
    """Ranks that a launcher has started on one of `nodes` nodes, as far as they can tell; MPI isn't there."""

    def __init__(self, nodes: int = 1):
        self.name = uuid.uuid4().hex
        self.nodes = nodes
        self.ranks = []
        self.reads, self._writes = os.pipe()

    def begin(self, *numbers: int) -> None:
        """Start ranks, all at once."""
        names = dict(SLURM_JOB_ID=self.name, SLURM_STEP_ID="0", SLURM_STEP_NUM_NODES=str(self.nodes))
        for number in numbers:
            pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._writes)
            env = environment(SLURM_PROCID=str(number), **names)
            self.ranks.append(
                subprocess.Popen([sys.executable, "-c", RANK], env=env, **pipes, start_new_session=True)
            )

    def wait_for_all(self) -> "NodesJob":
        assert [rank.stdout.readline() for rank in self.ranks] == [b"there True\n"] * len(self.ranks)
        return self

    def watchdogs(self) -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                ours = self.name.encode() in (folder / "environ").read_bytes()
                found += (
                    [int(folder.name)]
                    if ours and (folder / "cmdline").read_bytes().startswith(b"mpitrain-watchdog")
                    else []
                )
            except OSError:
                continue
        return found

    def said(self) -> str:
        """Return what came on stderr, when nobody has it open any more."""
        os.close(self._writes)
        self._writes = -1
        with os.fdopen(os.dup(self.reads)) as file:
            return file.read()

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.communicate()
        for pid in self.watchdogs():
            os.kill(pid, signal.SIGKILL)
        for number in {self.reads, self._writes} - {-1}:
            os.close(number)


STARTER = """
import os, signal
from mpitrain.cluster import watchdog_rendezvous
assert watchdog_rendezvous.start(f"\\0mpitrain-test-{os.getpid()}")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def job():
    found = NodesJob()
    yield found
    found.end()


@pytest.fixture
def node():
    """One of two."""
    found = NodesJob(nodes=2)
    yield found
    found.end()


def test_ranks_that_come_at_once_have_one_watchdog(job):
    job.begin(*range(6))
    assert len(job.wait_for_all().watchdogs()) == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=LONG)])
def test_a_rank_that_is_gone_is_named_once_and_the_others_end(job, number):
    job.begin(0, 1, 2)
    job.wait_for_all().ranks[1].send_signal(number)
    assert [rank.wait(patience(20)) for rank in job.ranks] == [1, -number, 1]
    assert [line.split(":")[1] for line in job.said().splitlines() if GONE in line] == [
        " rank 1 of 1 in phase start, starting"
    ]


def test_what_follows_is_not_reported(job):
    job.begin(0, 1, 2)
    for rank in job.wait_for_all().ranks:
        rank.kill()
    assert job.said().count("is gone") == 1


def test_one_that_comes_later_ends_too(job):
    job.begin(0)
    job.wait_for_all().ranks[0].kill()
    job.begin(1)
    assert job.ranks[1].wait(patience(20)) == 1
    assert job.said().count("is gone") == 1


def test_a_stopped_rank_is_killed(job):
    job.begin(0, 1)
    job.wait_for_all().ranks[0].send_signal(signal.SIGSTOP)
    job.ranks[1].kill()
    assert job.ranks[0].wait(patience(20)) == -signal.SIGKILL


def test_nobody_waits_for_the_watchdog_of_ranks_that_left(job):
    """It has the standard output and error of one of them."""
    job.begin(0, 1)
    for rank in job.wait_for_all().ranks:
        rank.stdin.write(b"leave\n")
        rank.stdin.flush()
    assert [rank.stdout.read() for rank in job.ranks] == [b"", b""]
    assert job.said() == ""


def test_nobody_waits_for_the_watchdog_of_a_rank_that_is_killed_before_it_connects():
    """A launcher ends when nobody has the rank's output open any more: that took a minute."""
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with subprocess.Popen([sys.executable, "-c", STARTER], **pipes) as rank:
        assert rank.wait(patience(20)) == -signal.SIGKILL
        begin_s = time.monotonic()
        assert rank.stdout.read() == b""
        assert time.monotonic() - begin_s < watchdog.CONNECT_S / 2


def test_ranks_of_another_job_continue(job, node):
    job.begin(0, 1)
    node.begin(0, 1)
    node.wait_for_all()
    job.wait_for_all().ranks[0].kill()
    assert job.ranks[1].wait(patience(20)) == 1 and [rank.poll() for rank in node.ranks] == [None, None]


@LONG
def test_ranks_that_a_launcher_ends_are_not_reported(job, node):
    """It asks them to first, or kills all ranks of this node because of one on another."""
    job.begin(0, 1)
    job.wait_for_all().ranks[0].send_signal(signal.SIGTERM)
    time.sleep(0.5)
    node.begin(0, 1)
    for rank in (*node.wait_for_all().ranks, *job.ranks):
        rank.kill()
    assert (job.said(), node.said()) == ("", "")


def test_a_rank_of_one_of_several_nodes_is_reported_if_others_live(node):
    node.begin(0, 1)
    node.wait_for_all().ranks[0].kill()
    assert node.ranks[1].wait(patience(20)) == -signal.SIGKILL
    assert node.said().count(f"rank 0 of 1 {GONE}") == 1


def test_a_process_that_no_launcher_started_has_none(monkeypatch):
    for name in ("PMIX_RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PMIX_NAMESPACE", "a job")
    assert watchdog_rendezvous.connect_to_job() is None
