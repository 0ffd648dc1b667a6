"""kill -9 of one rank, of all, or of mpirun, at any moment of a run that is always saving.

The restarts end as if nothing had been.

The run saves every second step beside the steps, and keeps few of them, so that at almost any
moment something is copied, written, synced, renamed or removed; every fourth kill comes at a chosen
call of the thread that does it. MPITRAIN_EFFORT=200 kills as often, by default there are a few;
MPITRAIN_EFFORT=50:100 takes kills 50 to 99.
"""

import random
import time
from contextlib import suppress

import pytest
from checkpoints import digest_of
from conftest import WITH_LONG
from effort import numbers
from launch import MPITRAIN, lines_in, loss_lines, planted, run_tiny, started, tail, tiny, write_text

from mpitrain.checkpoint.load import steps
from mpitrain.checkpoint.verify import verify

KILLS = numbers(range(0 if WITH_LONG else 2, 4), 200)
CALLS = 40_000  # of functions of mpitrain in the first threads of rank 0
STEPS = 20
SETTINGS = dict(run_steps=STEPS, run_save_every=2, run_eval_every=2, schedule_name="constant")
SETTINGS |= dict(run_keep=2, run_keep_every=10, run_keep_best=1)
MOST_IN_A_ROW = 4  # kills, until the run is let to its end


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("kills") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The run on one rank, without a kill: its loss lines, and the steps that are left with their digests."""
    run_dir = tmp_path_factory.mktemp("kills") / "whole"
    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    return loss_lines(run_dir), kept(run_dir)


def kept(run_dir):
    return {step: digest_of(run_dir / "checkpoints", step) for step in steps(run_dir / "checkpoints")}


def killed(dice, run_dir, text, at_a_call):
    """Start the run and kill something of it; return whether that was before its end, and what it said."""
    num_ranks = dice.choice([1, 2])
    env = {}
    if at_a_call:
        plan = {
            "rank": dice.randrange(num_ranks),
            "phase": "saving",
            "call": int(CALLS * dice.random() ** 2) + 1,
            "fault": "slow",
        }
        env = planted(plan)
    before = lines_in(run_dir)
    with started(
        num_ranks, MPITRAIN, "run", *tiny(run_dir, text, **SETTINGS, parallel_pp=num_ranks), env=env
    ) as job:
        if at_a_call:
            while job.process.poll() is None and "planted slow" not in job.text():
                time.sleep(0.002)
        elif dice.random() < 0.1:
            time.sleep(dice.uniform(0, 4))  # before there is anything to save
        else:
            while job.process.poll() is None and lines_in(run_dir) <= before:
                time.sleep(0.002)
            time.sleep(dice.expovariate(4))
        alive = job.process.poll() is None
        victim = dice.choice(["rank", "all", "mpirun"])
        # it ends just now
        with suppress(ProcessLookupError, IndexError, FileNotFoundError, AssertionError):
            if victim == "rank":
                job.signal(dice.choice(job.ranks()), 9)
                job.wait(30)
            elif victim == "mpirun":
                job.process.kill()
        return alive, job.text()


def test_restarts_end_as_the_run_that_was_never_killed(tmp_path, text, whole):
    lines, digests = whole
    number = KILLS.start
    last = KILLS.stop
    in_a_row = 0
    tries = 0
    run_dir = tmp_path / f"run-{number}"
    while number < last:
        dice = random.Random(f"kill {number}, try {tries}")
        alive, said = killed(dice, run_dir, text, number % 4 == 3)
        assert "Traceback" not in said or "planted" in said, tail(said)
        # it may end before the call that was chosen
        number = number + alive
        in_a_row = in_a_row + alive
        tries = 0 if alive else tries + 1
        for step in steps(run_dir / "checkpoints"):  # whatever is called a step is one
            verify(run_dir / "checkpoints" / f"step-{step:08d}")
        if alive and in_a_row < MOST_IN_A_ROW and number < last:
            continue
        num_ranks = dice.choice([1, 2])
        done = run_tiny(num_ranks, run_dir, text, **SETTINGS, parallel_pp=num_ranks)
        assert done.returncode == 0, f"after kill {number}\n{tail(done.output)}"
        assert loss_lines(run_dir) == lines, f"after kill {number}"
        assert kept(run_dir) == digests and not list((run_dir / "checkpoints").glob("*.*")), (
            f"after kill {number}: {kept(run_dir)}"
        )
        run_dir = tmp_path / f"run-{number}-{tries}"
        in_a_row = 0
