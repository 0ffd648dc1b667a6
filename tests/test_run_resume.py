"""A run that was stopped, in whatever way and moment, goes on with the bits of the run that never was."""

import re
import signal

import pytest
from launch import MPITRAIN, lines_in, loss_lines, mpirun, run_tiny, started, tail, tiny, write_text

STEPS = 40
SETTINGS = dict(run_steps=STEPS, run_save_every=4, schedule_name="constant")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("resume") / "text.txt")


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory, text):
    """The loss lines of the same run on one rank, without a stop."""
    run_dir = tmp_path_factory.mktemp("resume") / "whole"
    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    return loss_lines(run_dir)


def start(num_ranks, run_dir, text):
    """Start the run with one stage per rank; used as a context manager."""
    return started(num_ranks, MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=num_ranks, **SETTINGS))


def checkpoints(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if re.fullmatch(r"step-\d+", path.name))


def test_killed_again_and_again(tmp_path, text, never_stopped):
    """kill -9 of all ranks: before the first checkpoint, between two, while one is written, and of one rank only."""
    run_dir = tmp_path / "run"

    def saving():
        return lines_in(run_dir) >= 16 and any((run_dir / "checkpoints").glob("step-*.tmp"))

    for ready in (lambda: lines_in(run_dir) >= 2, lambda: lines_in(run_dir) >= 10, saving):
        with start(2, run_dir, text) as job:
            job.wait_for(ready, 60)
            job.kill()
        assert lines_in(run_dir) < STEPS - 1, "too late to show anything"
    with start(2, run_dir, text) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 25, 60)
        job.signal(job.ranks()[-1], signal.SIGKILL)
        done = job.wait(10)
        assert done.returncode not in (0, None), done.output
    assert lines_in(run_dir) < STEPS, "too late to show anything"
    with start(2, run_dir, text) as job:
        done = job.wait(60)
    assert done.returncode == 0 and "going on after step" in done.output, tail(done.output)
    assert loss_lines(run_dir) == never_stopped


@pytest.mark.parametrize(("number", "rank", "goes_on_with"), [(signal.SIGUSR1, 1, 4), (signal.SIGTERM, 0, 1)])
def test_asked_to_stop_saves_and_goes_on_in_another_layout(tmp_path, text, never_stopped, number, rank, goes_on_with):
    run_dir = tmp_path / "run"
    with start(2, run_dir, text) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 6, 60)
        job.signal(sorted(job.ranks())[rank], number)
        done = job.wait(20)
    assert done.returncode == 75, tail(done.output)
    stopped_at = lines_in(run_dir)
    assert 6 <= stopped_at < STEPS and done.output.count(f"stopped after step {stopped_at} with a checkpoint") == 1
    assert checkpoints(run_dir)[-1] == f"step-{stopped_at:08d}"
    with start(goes_on_with, run_dir, text) as job:
        done = job.wait(60)
    assert done.returncode == 0 and done.output.count(f"going on after step {stopped_at}") == 1, tail(done.output)
    assert loss_lines(run_dir) == never_stopped


def test_altered_checkpoint_is_refused_by_name_and_the_one_before_is_used(tmp_path, text, never_stopped):
    run_dir = tmp_path / "run"
    done = run_tiny(1, run_dir, text, **{**SETTINGS, "run_steps": 10})
    assert done.returncode == 0, tail(done.output)
    before, newest = checkpoints(run_dir)[-2:]
    assert (before, newest) == ("step-00000008", "step-00000010")
    shard = max((run_dir / "checkpoints" / newest).iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(content)

    done = run_tiny(1, run_dir, text, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    assert newest in done.output and f"using {before}" in done.output and "going on after step 8" in done.output, tail(done.output)
    assert loss_lines(run_dir) == never_stopped


def test_a_finished_run_is_left_as_it_is(tmp_path, text):
    run_dir = tmp_path / "run"
    command = ("run", *tiny(run_dir, text, run_steps=2))
    first = mpirun(1, MPITRAIN, *command)
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    again = mpirun(1, MPITRAIN, *command)
    assert first.returncode == again.returncode == 0, tail(again.output)
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics
    assert "done: 2 steps" in again.output
