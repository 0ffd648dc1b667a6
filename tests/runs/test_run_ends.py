"""However a job ends, it is gone in 30 s, no process is left, and the last line of mpitrain says
what went and which step is saved.

MPITRAIN_EFFORT=all sends every signal to every process, with and without a stop before, and with and
without a rank that dies meanwhile; MPITRAIN_EFFORT=0:60 takes cases 0 to 59. By default there are a
few.
"""

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from conftest import LONG, but_for
from effort import numbers
from launch import HERE, MPIRUN, MPITRAIN, Job, lines_in, mpirun, started, tail, tiny, write_text

SIGNALS = ("TERM", "INT", "HUP", "KILL", "STOP")
TARGETS = ("mpirun", "group", "rank", "watchdog")
GONE_S = 30
QUIET_S = 5  # after which a run that nothing ends is asked to leave: nobody wants its end
# comm.timeout_s, where a stopped process is to be found by it, and elsewhere
LIMIT_S = 12
LONG_S = 60
BEFORE = 4  # steps
SETTINGS = dict(run_steps=10**6, run_save_every=2, run_eval_every=0, schedule_name="constant")
FEW = ("TERM mpirun", "INT group", "KILL mpirun", "STOP mpirun, a rank dies", "STOP watchdog, a rank dies")
FEW += ("KILL watchdog, a rank dies",)


def every_case() -> list[str]:
    """Return each as in "STOP TERM mpirun, a rank dies": stopped first, and then sent another signal."""
    sent = [*SIGNALS, *(f"STOP {name}" for name in SIGNALS if name != "STOP")]
    return [f"{what} {target}{dies}" for dies in ("", ", a rank dies") for target in TARGETS for what in sent]


def chosen() -> list:
    asked = numbers(range(0), len(every_case()))
    if not asked:
        return but_for(FEW, longer=["TERM mpirun", "STOP mpirun, a rank dies", "KILL watchdog, a rank dies"])
    return every_case()[asked.start : asked.stop]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("ends") / "text.txt", 20_000)


def watchdogs(job: Job) -> list[int]:
    return [
        pid
        for pid in job._pids()
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"mpitrain-watchdog")
    ]


def left(job: Job) -> list[int]:
    """Return the processes of the job that have not ended."""
    job.process.poll()
    return [
        pid
        for pid in job._pids()
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    ]


def send(pids: list[int], name: str) -> None:
    for pid in pids:
        try:
            os.kill(pid, getattr(signal, f"SIG{name}"))
        except ProcessLookupError:  # the one before has ended it
            continue


def ended(job: Job, ranks: list[int], may_train: bool) -> tuple[float, bool]:
    """Wait until no process is left; return how long that took, and whether the run had to be asked to leave.

    Fail after GONE_S.
    """
    begin = time.monotonic()
    asked = False
    while pids := _left(job):
        quiet = time.monotonic() - begin > QUIET_S
        if may_train and not asked and quiet and ranks[0] in pids:
            send(ranks[:1], "USR1")
            begin = time.monotonic()
            asked = True
        assert time.monotonic() - begin < GONE_S, (
            f"after {GONE_S} s there is {[*map(_described, pids)]}\n{tail(job.text())}"
        )
        time.sleep(0.1)
    return time.monotonic() - begin, asked


def _left(job: Job) -> list[int]:
    try:
        return left(job)
    except OSError:  # one has ended just now
        return _left(job)


def _described(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/stat').read_text().partition(')')[0].partition('(')[2]}"
    except OSError:
        return f"{pid} that has ended"


def words_of(case: str) -> str:
    """Return a pattern for what the last line says went."""
    what = case.split()[0]
    dies = "dies" in case
    target = case.partition(",")[0].split()[-1]
    gone = r"rank \d.*(the process is gone|was asked to leave)"
    asked = r"asked to leave \(SIG\w+\)"
    launcher = r"the launcher \(\w+, process \d+\) "
    if dies:
        return f"{gone}|{asked}|{launcher}|rank.* made no progress"
    if target in ("mpirun", "group") and "KILL" in case:
        return f"{launcher}is gone"
    if target in ("mpirun", "group"):  # rank 0 waits for MPICH's now and then
        return f"{asked}|{launcher}"
    if target == "rank" and what in ("STOP", "KILL"):
        return f"rank.* made no progress|{gone}"
    return asked


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("case", chosen())
def test_a_job_is_gone_in_30_s_and_says_what_went_and_what_is_saved(tmp_path, text, case):
    run_dir, (sent, _, dies) = tmp_path / "run", case.partition(",")
    *names, target = sent.split()
    limit_s = LIMIT_S if names[0] == "STOP" and target != "watchdog" else LONG_S
    command = MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, comm_timeout_s=limit_s, **SETTINGS)
    with started(2, *command) as job:
        job.wait_for(lambda: lines_in(run_dir) > BEFORE, 150)
        ranks = job.ranks()
        top = job.process.pid
        victims = {"mpirun": [top], "group": [-top], "rank": ranks[1:], "watchdog": watchdogs(job)}[target]
        for name in names:
            send(victims, name)
            time.sleep(0.05)
        if dies:
            time.sleep(0.3)
            send(ranks[:1] if target == "rank" else ranks[1:], "KILL")
        took_s, asked = ended(
            job, ranks, may_train=not dies and not (target == "rank" and names[0] == "STOP")
        )
        output = job.text()
        code = job.process.wait()
    said = [line for line in output.splitlines() if line.startswith(("mpitrain: ", "stopped after"))]
    print(
        f"{case}: gone after {took_s:.1f} s{', asked' if asked else ''}, exit code {code}: "
        f"{said[-1] if said else 'nothing said'}"
    )
    assert said and re.search(words_of(case), said[-1]), tail(output)
    (step,) = re.findall(r"; step (\d+) is saved", said[-1])
    assert (run_dir / "checkpoints" / f"step-{int(step):08d}").is_dir(), tail(output)


@LONG
def test_ranks_that_have_lost_the_daemon_of_their_node_end(tmp_path, text):
    """As on each node but the launcher's, of which nothing is above a rank.

    And ranks are in process groups of their own.
    """
    if not (HERE / "mpichversion").exists():
        pytest.skip("MPICH's launcher takes another program for ssh")
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift 2\neval "setsid -f $*"\nwhile kill -0 $PPID; do sleep 0.2; done\n')
    ssh.chmod(0o755)
    nodes = "-launcher", "ssh", "-launcher-exec", str(ssh), "-hosts", "elsewhere:2", "-n", "2"
    run_dir = tmp_path / "run"
    with started(
        0, MPIRUN, *nodes, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, **SETTINGS), forked=False
    ) as job:
        job.wait_for(lambda: lines_in(run_dir) > BEFORE, 150)
        ranks = job.ranks()
        daemons = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in ranks}
        assert len(daemons) == 1 and _described(*daemons).endswith("hydra_pmi_proxy")
        send([*daemons, job.process.pid], "KILL")
        took_s, _ = ended(job, ranks, may_train=False)
    assert took_s < GONE_S


ENDS_BEFORE_ITS_MESSAGE_IS_READ = """
import os, signal, sys, time
import torch
from mpi4py import MPI
from mpitrain.comm.base.grid import Grid
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.errors import DeliveryError

comm = MPI.COMM_WORLD
mesh = Mesh(comm, Grid({"pp": 2}), {"links": range(2)}, timeout_s=20)
links = Links(mesh["links"], 2, 4)
pid = comm.bcast(os.getpid(), 0)
if comm.rank == 0:
    links.send("F", 1, 2, torch.zeros(1 << 20), 1)
    comm.Barrier()
    os.kill(pid, signal.SIGKILL)
comm.Barrier()
while os.path.exists(f"/proc/{pid}/exe"):
    time.sleep(0.01)
try:
    links.receive("F", 1, 2, torch.empty(1 << 20), 0).wait()
except DeliveryError as error:
    with open(sys.argv[1] + ".part", "w") as file:
        file.write(str(error))
    os.rename(file.name, sys.argv[1])
os._exit(0)
"""


# a launcher that sees a rank end kills the others: it sees a shell, which stays until one has spoken
OUTLIVES_IT = '"$0" "$1" "$2"; for _ in $(seq 200); do [ -e "$2" ] && break; sleep 0.1; done'


def test_a_message_of_a_rank_that_has_ended_is_not_one_that_was_too_long(tmp_path):
    """A large one is read out of the memory of the rank that sends it (CMA), which is gone by then."""
    if not (HERE / "mpichversion").exists():
        pytest.skip("other MPIs copy such a message, or have other words")
    program, found = tmp_path / "ends.py", tmp_path / "found"
    program.write_text(ENDS_BEFORE_ITS_MESSAGE_IS_READ)
    mpirun(2, "sh", "-c", OUTLIVES_IT, sys.executable, str(program), str(found), timeout=60)
    assert found.read_text().startswith("DeliveryError: F2 for stage 1 from rank 0 of links: ")
    assert "\n" not in found.read_text() and "longer message" not in found.read_text()
