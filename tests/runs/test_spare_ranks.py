"""Spare ranks take the places of ranks that are killed with -9 (recovery.spares), under Open MPI with ULFM.

A job ends by itself with the losses and the digest of a run that nobody disturbed. MPITRAIN_EFFORT=200
kills in 200 runs, over all layouts.
"""

import random
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from checkpoints import digest_of
from effort import numbers
from fault_tolerance import ULFM, WITHOUT_ULFM
from launch import (
    MPIRUN,
    MPITRAIN,
    lines_in,
    loss_lines,
    mpirun,
    run_tiny,
    short,
    started,
    tail,
    tiny,
    write_text,
)
from undisturbed import undisturbed_runs

from mpitrain.checkpoint.folders import TMP
from mpitrain.checkpoint.load import steps
from mpitrain.cluster.lock import GONE_S

STEPS = 14
SETTINGS = dict(run_steps=STEPS, run_save_every=4, run_eval_every=6, recovery_every=1)
MOE = dict(model_family="mixtral", model_layers=2, experts_count=4)
LAYOUTS = [
    (2, dict(parallel_dp=2, parallel_zero=1)),
    (4, dict(parallel_pp=2, parallel_tp=2, pipeline_schedule="zbv", pipeline_chunks=2)),
    (2, dict(parallel_dp=2)),
    (2, dict(parallel_dp=2, parallel_zero=3)),
    (4, dict(parallel_dp=4, parallel_zero=2)),
    (4, dict(parallel_dp=4, parallel_zero=3, parallel_dp_shard=2)),
    (2, dict(parallel_cp=2)),
    (2, dict(parallel_ep=2, parallel_dp=2, **MOE)),
    (4, dict(parallel_dp=4, parallel_zero=1, comm_node_ranks=1)),
    (8, dict(parallel_dp=2, parallel_pp=2, parallel_tp=2, parallel_zero=1)),
]
SPARES = 2
KILLS = numbers(range(4), 200)
# Open MPI 5.0.11 calls collectives of a communicator that it hasn't chosen yet, if a rank of it dies there
CRASH = "ompi_comm_set_rank_failed"
MOMENTS = ("a step", "two at once", "a repair", "a save", "the start")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("spares") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text):
    return undisturbed_runs(tmp_path_factory.mktemp("whole"), text, LAYOUTS, SETTINGS)


def with_spares(num_ranks, run_dir, text, *, spares=SPARES, each=(), **settings):
    """Return the command of a run with ranks beyond its layout; `each`: words before each rank's own."""
    run = tiny(run_dir, text, **SETTINGS | settings, recovery_spares=spares)
    return [MPIRUN, "--with-ft", "ulfm", "-n", str(num_ranks + spares), *each, MPITRAIN, "run", *run]


def living(job):
    """Return the processes of the job's ranks by the number that mpirun gave them."""
    found = {}
    for pid in job.ranks():
        with suppress(OSError):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            if number := re.search(rb"\0OMPI_COMM_WORLD_RANK=(\d+)", environment):
                found[int(number[1])] = pid
    return found


def kill(job, number):
    with suppress(ProcessLookupError, AssertionError, KeyError):
        job.signal(living(job)[number], signal.SIGKILL)


def has_ended(job):
    return job.process.poll() is not None


def kill_at(moment, job, run_dir, num_ranks, dice):
    """Kill a rank, or two, at a moment of the run."""
    first, second = dice.sample(range(num_ranks), 2)
    if moment == "the start":  # when all have joined, and before the first step
        job.wait_for(lambda: has_ended(job) or (run_dir / "run.lock").exists(), 60)
        time.sleep(dice.random())
    elif moment == "a save":
        folder = run_dir / "checkpoints"
        job.wait_for(lambda: has_ended(job) or any(folder.glob(f"*{TMP}")) or lines_in(run_dir) > 8, 60)
    else:
        step = dice.randrange(1, STEPS - 4)
        job.wait_for(lambda: has_ended(job) or lines_in(run_dir) >= step, 60)
        time.sleep(dice.expovariate(10))
    kill(job, first)
    if moment == "a repair":
        time.sleep(dice.choice([0.001, 0.01, 0.1, 0.5]) * dice.random())
    if moment in ("two at once", "a repair"):
        kill(job, second)


@ULFM
@pytest.mark.parametrize("number", KILLS)
def test_spares_replace_killed_ranks(tmp_path, text, undisturbed, number):
    dice = random.Random(f"spares {number}")
    which = number % len(LAYOUTS)
    num_ranks, layout = LAYOUTS[which]
    whole = undisturbed(which)
    run_dir = tmp_path / "run"
    moment = MOMENTS[(number + number // len(LAYOUTS)) % len(MOMENTS)]
    with started(0, *with_spares(num_ranks, run_dir, text, **layout), forked=False) as job:
        kill_at(moment, job, run_dir, num_ranks, dice)
        done = job.wait(120)
    said = f"killed in {moment}:\n{tail(done.output)}"
    assert "the process is gone" in done.output, said
    if CRASH in done.output:  # the job has ended: it starts again, as mpitrain supervise has it
        done = run_tiny(num_ranks, run_dir, text, **SETTINGS | layout)
    else:
        assert "repaired in" in done.output, said
    assert loss_lines(run_dir) == loss_lines(whole), said
    assert digest_of(run_dir / "checkpoints", STEPS) == digest_of(whole / "checkpoints", STEPS), said


@ULFM
def test_more_deaths_than_spares_end_the_job(tmp_path, text, undisturbed):
    """Its next start resumes after the last step that all had done."""
    whole = undisturbed(0)
    run_dir = tmp_path / "run"
    with started(0, *with_spares(2, run_dir, text, spares=1), forked=False) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        kill(job, 0)
        kill(job, 1)
        done = job.wait(60)
    assert done.returncode not in (0, None) and "too few spares" in done.output, tail(done.output)
    done = run_tiny(2, run_dir, text, **SETTINGS | LAYOUTS[0][1])
    assert done.returncode == 0 and "resuming after step" in done.output, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(whole)


@ULFM
def test_a_death_before_all_have_joined_ends_the_job(tmp_path, text):
    """Open MPI reports none before MPI_Init: the others wait for comm.timeout_s, or for START_S."""
    command = with_spares(2, tmp_path / "run", text, **LAYOUTS[0][1], comm_timeout_s=short(8))
    with started(0, *command, forked=False) as job:
        job.wait_for(lambda: 1 in living(job), 60)
        kill(job, 1)
        done = job.wait(60)
    assert done.returncode not in (0, None), tail(done.output)
    assert "for all ranks to call MPI_Init: waits for other ranks" in done.output, tail(done.output)


@ULFM
def test_the_death_of_a_spare_leaves_the_run_alone(tmp_path, text, undisturbed):
    whole = undisturbed(0)
    run_dir = tmp_path / "run"
    with started(0, *with_spares(2, run_dir, text, **LAYOUTS[0][1]), forked=False) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        kill(job, 2)
        done = job.wait(60)
    assert "spare rank 2" in done.output and done.returncode == 0, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(whole)


APART = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]  # in a namespace of processes
CAN_PART = (
    bool(shutil.which(APART[0])) and not subprocess.run([*APART, "true"], capture_output=True).returncode
)


@ULFM
@pytest.mark.skipif(not CAN_PART, reason="a namespace of processes needs root, and unshare")
def test_a_spare_that_sees_nothing_of_the_dead_first_rank_has_its_lock_at_once(tmp_path, text, undisturbed):
    """As on another host: of a holder there only a lock's signs of life can be seen."""
    whole = undisturbed(0)
    run_dir = tmp_path / "run"
    apart = {"OMPI_MCA_btl": "tcp,self"}  # Open MPI's shared memory asks for processes by number
    command = with_spares(2, run_dir, text, each=APART, **LAYOUTS[0][1])
    with started(0, *command, env=apart, forked=False) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 3, 60)
        kill(job, 0)
        begin_s = time.monotonic()
        done = job.wait(90)
        took_s = time.monotonic() - begin_s
    assert "the place of rank 0" in done.output and "lock taken over" in done.output, tail(done.output)
    assert took_s < GONE_S, tail(done.output)
    assert loss_lines(run_dir) == loss_lines(whole)


@ULFM
def test_asked_to_leave_during_a_repair_it_saves_a_step_first(tmp_path, text):
    run_dir = tmp_path / "run"
    layout = LAYOUTS[0][1] | dict(run_save_every=0, run_steps=1000)
    with started(0, *with_spares(2, run_dir, text, **layout), forked=False) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 4, 60)
        first = living(job)[0]
        kill(job, 1)
        job.signal(first, signal.SIGUSR1)
        done = job.wait(60)
    assert done.returncode == 75 and "repaired in" in done.output, tail(done.output)
    assert max(steps(run_dir / "checkpoints"), default=0) >= 4, tail(done.output)


LEFT_ALONE = """
import os, signal, time
from mpitrain.comm.base.mpi import MPI
from mpitrain.comm.base.revocable import RevocableComm
from mpitrain.comm.base.spare_ranks import SPARE, SpareRanks
from mpitrain.comm.base.world import start

start()
spares = SpareRanks(RevocableComm.first(MPI.COMM_WORLD), 1)
spares.make_layout()
if spares.place == SPARE:
    os.kill(os.getpid(), signal.SIGKILL)
if spares.place == 0:  # had an error where the other one has another communicator now
    MPI.Intracomm.Split(spares.layout)
    time.sleep(1)
else:
    try:
        spares.layout.Split().recv(source=0)
    except MPI.Exception as error:
        print("woken:", error.Get_error_class() == MPI.ERR_REVOKED)
spares.revoke()
spares.ended_well(False)
print("lost:", spares.repair(None), flush=True)
os._exit(0)
"""


@ULFM
def test_a_rank_that_waits_where_others_never_were_is_woken(tmp_path):
    """A death while a communicator is made can leave it with some of its ranks alone."""
    (tmp_path / "alone.py").write_text(LEFT_ALONE)
    command = [MPIRUN, "--with-ft", "ulfm", "-n", "3", sys.executable, str(tmp_path / "alone.py")]
    done = mpirun(0, *command, forked=False, timeout=30)
    assert done.output.count("lost: []") == 2 and "woken: True" in done.output, tail(done.output)


@ULFM
def test_spares_without_fault_tolerance_are_refused(tmp_path, text):
    done = run_tiny(3, tmp_path / "run", text, **SETTINGS, recovery_spares=1)
    assert done.returncode == 2 and "mpirun --with-ft ulfm" in done.output, tail(done.output)
    assert not (tmp_path / "run").exists()


@WITHOUT_ULFM
def test_spares_are_refused_by_an_mpi_without_ulfm(tmp_path, text):
    done = run_tiny(3, tmp_path / "run", text, **SETTINGS, recovery_spares=1)
    assert done.returncode == 2 and "needed an MPI with ULFM" in done.output, tail(done.output)
    assert not (tmp_path / "run").exists()


def test_transports_that_share_memory_are_refused_with_spares(tmp_path, text):
    shown = mpirun(
        0, MPITRAIN, "plan", *tiny(tmp_path, text, recovery_spares=1, comm_transport="shared"), "--ranks", "2"
    )
    assert shown.returncode == 2 and 'use comm.transport = "messages"' in shown.output
