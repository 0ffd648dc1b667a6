"""Who says that a rank is gone before the watchdog of its node is there, and where watchdogs speak."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid

import pytest
from launch import MPIRUN, MPITRAIN, environment, started, tail

from mpitrain.cluster.first_watch import COME_S, OVER, WATCHED
from mpitrain.cluster.processes import parents_of, peer_of

GONE = "in phase start, before its watchdog was there: the process is gone"
RANK = """
import os, sys, time
from mpitrain.cluster.first_watch import join_first_watch
first = join_first_watch(sys.argv[1])
print("there", first is not None, flush=True)
for line in sys.stdin:
    if line == "hear\\n":
        print(first.recv(16), flush=True)
    elif line.startswith("say "):
        first.send(line[4:-1].encode())
        print("said", flush=True)
"""


class Rank:
    """A process that plays a rank of a job, and does as it is told."""

    def __init__(self, job, number, errors):
        command, env = [sys.executable, "-c", RANK, f"rank {number} of 3"], environment(PMIX_NAMESPACE=job)
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True)
        assert self.process.stdout.readline() == "there True\n"

    def asked(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def ranks(tmp_path):
    """Three ranks of a job, and the file that has what is said of them."""
    job = f"test-{uuid.uuid4().hex}"
    with open(tmp_path / "errors", "w") as errors:
        found = [Rank(job, number, errors) for number in range(3)]
    yield found, tmp_path / "errors"
    for rank in found:
        rank.kill()


def settled(said):
    """Return what was said when it has been quiet for a moment."""
    before = None
    while before != (before := said.read_text()) or not before:
        time.sleep(0.3)
    return before


def test_a_rank_that_is_gone_is_named_once_and_the_others_are_asked_to_end(ranks):
    (first, second, third), said = ranks
    second.kill()
    assert first.asked("hear") == "b'1'" and third.asked("hear") == "b'1'"
    first.kill()
    third.kill()
    assert settled(said).count("is gone") == 1 and f"mpitrain: rank 1 of 3 {GONE}" in said.read_text()


def test_a_stopped_rank_is_killed_when_another_is_gone(ranks):
    (first, second, third), _ = ranks
    third.process.send_signal(signal.SIGSTOP)
    second.kill()
    assert first.asked("hear") == "b'1'"
    first.kill()
    assert third.process.wait(20) == -signal.SIGKILL


def test_ranks_that_end_in_good_order_are_not_reported(ranks):
    (first, second, _), said = ranks
    assert first.asked(f"say {OVER.decode()}") == "said"
    assert second.asked("hear") == "b''"
    second.kill()
    time.sleep(0.5)
    assert said.read_text() == ""


def test_it_answers_until_all_ranks_of_a_watchdog_are_known_to_it(ranks):
    (first, second, third), said = ranks
    group = f"say {WATCHED.decode()} 2 some-watchdog"
    assert first.asked(group) == second.asked(group) == "said"
    assert first.asked("hear") == second.asked("hear") == "b''"
    first.kill()
    third.kill()
    assert settled(said).count("is gone") == 1 and "rank 2 of 3" in said.read_text()


def test_one_that_was_known_to_a_watchdog_alone_is_reported(ranks):
    (first, _, _), said = ranks
    assert first.asked(f"say {WATCHED.decode()} 3 some-watchdog") == "said"
    first.kill()
    assert "rank 0 of 3" in settled(said)


def test_parents_and_peers():
    assert next(parents_of(os.getpid()))[0] == os.getppid()
    a, b = socket.socketpair(socket.AF_UNIX)
    assert peer_of(a) == (os.getpid(), os.getuid(), os.getgid())
    a.close()
    b.close()


# ---------------------------------------------------------------- under mpirun


@pytest.mark.parametrize("to", ["> log 2>&1", ">> log 2>&1", "2>&1 | cat > log", "a terminal"])
def test_the_reason_comes_once_wherever_the_output_goes(tmp_path, to):
    """Open MPI's launcher forgets what it has not read when a rank has ended with an exit code."""
    (tmp_path / "it.py").write_text(
        "import os, time\nfrom mpitrain.cluster.guard import Guard\nguard = Guard()\ntime.sleep(1)\n"
        "os._exit(3) if guard.place.rank == 1 else time.sleep(60)"
    )
    command = f"{MPIRUN} -n 2 {sys.executable} it.py"
    shell = f"script -qec '{command}' log > /dev/null" if to == "a terminal" else f"{command} {to}"
    subprocess.run(["bash", "-c", shell], cwd=tmp_path, env=environment(), stdin=subprocess.DEVNULL, timeout=60)
    text = (tmp_path / "log").read_text(errors="replace")
    assert len(re.findall(f"mpitrain: rank 1 of 2 {GONE}", text)) == 1, text


def test_ranks_that_leave_are_not_waited_for():
    """The first watch holds the standard error of a rank; who waits for its end must not wait for it."""
    with started(2, MPITRAIN, "run", "--set", "run.nonsense=1") as job:
        done = job.wait(60)
    assert done.returncode == 2 and "is gone" not in done.output, tail(done.output)
    assert done.wall_s < COME_S
