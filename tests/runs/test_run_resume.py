"""A run that was stopped, at chosen moments, resumes with the bits of the run that never was.
tests/runs/test_run_kills.py chooses none.
"""

import re
import shutil
import signal

import pytest
from conftest import LONG
from launch import (
    MPITRAIN,
    lines_in,
    loss_lines,
    mpirun,
    run_commands,
    run_several,
    run_tiny,
    started,
    tail,
    tiny,
    write_text,
)

STEPS = 32
SETTINGS = dict(run_steps=STEPS, run_save_every=4, run_eval_every=16, schedule_name="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("resume") / "text.txt")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The same run on one rank, without a stop."""
    run_dir = tmp_path_factory.mktemp("resume") / "whole"
    run_several(1, text, {run_dir: SETTINGS})
    return run_dir


@pytest.fixture(scope="module")
def never_stopped(whole):
    """Its loss lines."""
    return loss_lines(whole)


def command(num_ranks, run_dir, text):
    """Return the command of the run with one stage per rank."""
    return [MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=num_ranks, **SETTINGS)]


def start(num_ranks, run_dir, text):
    """Start the run from nothing, to be killed; used as a context manager."""
    return started(num_ranks, *command(num_ranks, run_dir, text))


def checkpoints(run_dir):
    return sorted(
        path.name for path in (run_dir / "checkpoints").iterdir() if re.fullmatch(r"step-\d+", path.name)
    )


@LONG
def test_killed_again_and_again(tmp_path, text, never_stopped):
    """kill -9 of all ranks: before the first checkpoint, between two, while one is written, and of
    one rank only.
    """
    run_dir = tmp_path / "run"

    def saving():
        return lines_in(run_dir) >= 16 and any((run_dir / "checkpoints").glob("step-*.tmp"))

    for ready in (lambda: lines_in(run_dir) >= 2, lambda: lines_in(run_dir) >= 10, saving):
        with start(2, run_dir, text) as job:
            job.wait_for(ready, 60)
            job.kill()
        assert lines_in(run_dir) < STEPS - 1, "too late to show anything"
    with start(2, run_dir, text) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 22, 60)
        job.signal(job.ranks()[-1], signal.SIGKILL)
        done = job.wait(10)
        assert done.returncode not in (0, None), done.output
    assert lines_in(run_dir) < STEPS, "too late to show anything"
    done = mpirun(2, *command(2, run_dir, text))
    assert done.returncode == 0 and "resuming after step" in done.output, tail(done.output)
    assert loss_lines(run_dir) == never_stopped


@pytest.mark.parametrize(
    ("number", "rank", "resumes_with"),
    [(signal.SIGUSR1, 1, 4), pytest.param(signal.SIGTERM, 0, 1, marks=LONG)],
)
def test_asked_to_stop_saves_and_resumes_in_another_layout(
    tmp_path, text, never_stopped, number, rank, resumes_with
):
    run_dir = tmp_path / "run"
    with start(2, run_dir, text) as job:
        job.wait_for(lambda: lines_in(run_dir) >= STEPS // 2, 60)
        job.signal(job.ranks()[rank], number)
        done = job.wait(20)
    assert done.returncode == 75, tail(done.output)
    stopped_at = lines_in(run_dir)
    assert (
        STEPS // 2 <= stopped_at < STEPS
        and done.output.count(f"stopped after step {stopped_at} with a checkpoint") == 1
    )
    assert checkpoints(run_dir)[-1] == f"step-{stopped_at:08d}"
    (done,) = run_commands(resumes_with, command(resumes_with, run_dir, text)[1:])
    assert done.returncode == 0 and done.output.count(f"resuming after step {stopped_at}") == 1, tail(
        done.output
    )
    assert loss_lines(run_dir) == never_stopped


def test_an_altered_checkpoint_is_refused_by_name_and_a_finished_run_is_left_as_it_is(
    tmp_path, text, whole, never_stopped
):
    altered, finished = (shutil.copytree(whole, tmp_path / name) for name in ("altered", "finished"))
    before, newest = checkpoints(altered)[-2:]
    shard = max((altered / "checkpoints" / newest).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)
    there = (finished / "metrics.jsonl").read_bytes()

    done, again = run_commands(
        1, *(("run", *tiny(run_dir, text, **SETTINGS)) for run_dir in (altered, finished))
    )
    assert (before, newest) == (f"step-{STEPS - 4:08d}", f"step-{STEPS:08d}")
    assert done.returncode == 0, tail(done.output)
    words = (newest, f"using {before}", f"resuming after step {STEPS - 4}")
    assert all(word in done.output for word in words), tail(done.output)
    assert loss_lines(altered) == never_stopped
    assert again.returncode == 0 and f"done: {STEPS} steps" in again.output, tail(again.output)
    assert (finished / "metrics.jsonl").read_bytes() == there


def test_a_run_at_its_last_step_says_that_nothing_is_left(tmp_path, text):
    first, again = (run_tiny(1, tmp_path / "run", text, run_steps=3) for _ in range(2))
    assert (first.returncode, again.returncode) == (0, 0), tail(again.output)
    assert (
        "resuming after step 3 of " in again.output
        and ": nothing is left to do, run.steps = 3" in again.output
    ), tail(again.output)
    assert "predicted  measured" in first.output and "predicted  measured" not in again.output, (
        "nothing was measured"
    )
