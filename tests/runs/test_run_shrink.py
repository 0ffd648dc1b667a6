"""Runs with fewer data ranks than before, and with all of them again: the bits stay those of all
(numerics.reproducible = "layout", recovery.shrink).
"""

import json
import os
import signal

import pytest
from checkpoints import digest_of
from conftest import LONG
from fault_tolerance import ULFM
from launch import (
    MPIRUN,
    MPITRAIN,
    finished,
    lines_in,
    loss_lines,
    mpirun,
    run_tiny,
    started,
    tail,
    tiny,
    write_text,
)

STEPS = 9
TREE = dict(
    numerics_reproducible="layout", batch_global=8, batch_micro=1, run_steps=STEPS, run_eval_every=STEPS,
    schedule_name="constant", comm_timeout_s=120,
)  # fmt: skip
SHRINKING = TREE | dict(recovery_shrink="true", recovery_every=1, parallel_dp=4)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("shrink") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, text):
    """The run directory of a run that has four data ranks all along."""
    run_dir = tmp_path_factory.mktemp("shrink") / "whole"
    done = run_tiny(4, run_dir, text, **TREE, parallel_dp=4)
    assert done.returncode == 0, tail(done.output)
    return run_dir


def require_same(run_dir, whole, said):
    assert trained(run_dir) == trained(whole), said
    assert digest_of(run_dir / "checkpoints", STEPS) == digest_of(whole / "checkpoints", STEPS), said


def trained(run_dir):
    """Return what the steps computed, without validation, which shorter parts of a run have, too."""
    lines = map(json.loads, loss_lines(run_dir))
    return [{key: value for key, value in line.items() if key != "val_loss"} for line in lines]


ZEROES = [1, pytest.param(2, marks=LONG), 3]


@pytest.mark.parametrize("zero", ZEROES)
def test_four_three_and_four_data_ranks_have_the_bits_of_four(tmp_path, text, undisturbed, zero):
    run_dir = tmp_path / "run"
    for num_ranks, steps in ((4, 3), (3, 6), (4, STEPS)):
        layout = dict(parallel_dp=num_ranks, parallel_zero=zero)
        done = run_tiny(num_ranks, run_dir, text, **TREE | layout | dict(run_steps=steps))
        assert done.returncode == 0, tail(done.output)
        assert f"microbatches a rank: {'2' if num_ranks == 4 else '2 to 3'};" in done.output
    require_same(run_dir, undisturbed, tail(done.output))


PIPELINE = TREE | dict(parallel_pp=2, pipeline_schedule="zbv", pipeline_chunks=2)


def of_commands(command, *options):
    return finished([MPITRAIN, command, *options], capture_output=True, text=True)


def test_an_empty_microbatch_is_shown_and_rehearsed(tmp_path, text):
    """Three data ranks of two stages have 3, 3 and 2 of 8 microbatches."""
    keys = tiny(tmp_path, text, **PIPELINE, parallel_dp=3)
    for rank, said in ((1, "3 to 5 of the 8 of a step"), (5, "6 to 7 of the 8 of a step; empty: 2")):
        program = of_commands("program", "--ranks", "6", "--rank", str(rank), *keys)
        assert f"# microbatches {said}" in program.stdout.splitlines(), program
    checked = of_commands("check", "--ranks", "6", *keys)
    said = " ".join(checked.stdout.split())  # lines are folded
    assert "of which data ranks have 2 to 3 and sum up to 2 subtrees" in said, checked
    done = mpirun(6, MPITRAIN, "run", "--dry-run", *keys)
    assert done.returncode == 0 and "2 to 3 microbatches a rank" in done.output, tail(done.output)


@LONG
def test_an_empty_microbatch_passes_through_a_pipeline(tmp_path, text, undisturbed):
    done = run_tiny(6, tmp_path / "run", text, **PIPELINE, parallel_dp=3)
    assert done.returncode == 0, tail(done.output)
    require_same(tmp_path / "run", undisturbed, tail(done.output))


def test_a_run_that_may_shrink_says_what_it_needs(tmp_path, text):
    for changes, said in (
        (dict(numerics_reproducible="run"), 'use numerics.reproducible = "layout"'),
        (dict(parallel_dp=0), "needed what the run has with all its ranks; set both"),
        (dict(parallel_zero=0), "parallel.zero = 0 takes one"),
    ):
        done = of_commands("check", "--ranks", "4", *tiny(tmp_path, text, **SHRINKING | changes))
        assert done.returncode == 2 and said in done.stderr, done


@ULFM
@pytest.mark.parametrize("spares", [0, 1])
def test_a_job_shrinks_when_no_spare_is_left_and_grows_at_its_next_start(tmp_path, text, undisturbed, spares):
    """A rank dies for each spare, and one more. Later the job is asked to leave, and starts with all.

    Without spares it is rank 0, whose place another one takes, which wrote to a log before.
    """
    run_dir = tmp_path / "run"
    keys = tiny(run_dir, text, **SHRINKING, recovery_spares=spares, run_logs="true")
    begun = [MPIRUN, "--with-ft", "ulfm", "-n", str(4 + spares), MPITRAIN, "run", *keys]
    with started(0, *begun, forked=False) as job:
        for died in range(1 + spares):
            job.wait_for(lambda: lines_in(run_dir) >= 2 + died, 60)  # noqa: B023
            job.signal(job.ranks()[spares], signal.SIGKILL)
        job.wait_for(lambda: "the run resumes with 3" in job.text(), 60)
        now = lines_in(run_dir)
        job.wait_for(lambda: lines_in(run_dir) > now, 60)
        os.kill(job.ranks()[0], signal.SIGUSR1)
        done = job.wait(60)
    assert done.returncode in (0, 75), tail(done.output)
    assert "stopped after step" in done.output or "done: " in done.output, tail(done.output)
    done = mpirun(0, *begun)
    assert done.returncode == 0, tail(done.output)
    require_same(run_dir, undisturbed, tail(done.output))
