"""A run leaves in time: with a checkpoint before its allocation ends, at once when asked twice, and without one when three times."""

import json
import re
import signal
import sys
import time
from contextlib import contextmanager

import noted
import pytest
from launch import MPITRAIN, loss_lines, run_tiny, started, tail, tiny, write_text

from mpitrain.cluster.allocation import End
from mpitrain.cluster.guard import ECHO_S, Guard
from mpitrain.training.leaving import ASSUMED_BYTES_S, HURRY, LEAVE, STAY, Leaving

SETTINGS = dict(schedule_name="constant", run_eval_every=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("leaving") / "text.txt")


def command(run_dir, text, **changes):
    return [MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, **SETTINGS | changes)]


def saved(run_dir):
    return sorted(path.name for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name))


def test_a_run_leaves_before_its_time_is_over_and_goes_on_with_the_same_bits(tmp_path, text):
    limit_s, margin_s = 10, 5
    ends = {"MPITRAIN_JOB_END": str(int(time.time()) + limit_s)}
    endless = command(tmp_path / "run", text, run_steps=10**6, run_save_every=0, run_time_margin_s=margin_s)
    with started(2, *endless, env=ends) as job:
        done = job.wait(limit_s)
    assert done.returncode == 75, tail(done.output)
    (step,) = re.findall(r"stopped after step (\d+) with a checkpoint, (?:\d+) s before .* \(MPITRAIN_JOB_END\)", done.output)
    assert saved(tmp_path / "run") == [f"step-{int(step):08d}"]
    again, whole = (dict(run_steps=int(step) + 3, parallel_pp=ranks, **SETTINGS) for ranks in (2, 1))
    done = run_tiny(2, tmp_path / "run", text, **again)
    assert done.returncode == 0 and f"going on after step {step}" in done.output, tail(done.output)
    done = run_tiny(1, tmp_path / "whole", text, **whole)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(tmp_path / "run") == loss_lines(tmp_path / "whole")


def asked(job, pid):
    """Ask a rank to leave, as a scheduler does: twice at once is one request."""
    for _ in range(2):
        if pid in job.ranks():  # it may have left for the first of the two
            job.signal(pid, signal.SIGUSR1)
        time.sleep(0.2)
    time.sleep(ECHO_S)


@contextmanager
def validating(run_dir, text):
    """Start a run whose validation takes for ever, and wait until both ranks are in it: before, a signal ends a run at once."""
    notes = run_dir.with_name("notes")
    notes.mkdir()
    program = sys.executable, noted.__file__, str(notes), *command(run_dir, text, run_eval_batches=10**6)[1:]
    with started(2, *program) as job:
        job.wait_for(lambda: sum("in phase validation" in min(noted.read(path)) for path in notes.iterdir()) == 2, 60)
        yield job


def test_a_second_signal_hurries(tmp_path, text):
    run_dir = tmp_path / "run"
    with validating(run_dir, text) as job:
        for _ in range(2):
            asked(job, job.ranks()[0])
        done = job.wait(20)
    assert done.returncode == 75, tail(done.output)
    assert saved(run_dir) == ["step-00000001"] and "stopped after step 1 with a checkpoint" in done.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and not any("val_loss" in line for line in lines)


def test_a_third_signal_ends_a_run_that_gets_no_further(tmp_path, text):
    run_dir = tmp_path / "run"
    with validating(run_dir, text) as job:
        first, second = job.ranks()
        job.signal(second, signal.SIGSTOP)
        for _ in range(2):
            asked(job, first)
            assert job.process.poll() is None
        asked(job, first)
        done = job.wait(20)
    assert done.returncode == 75 and done.output.count("was asked to leave") == 1, tail(done.output)
    assert not (run_dir / "checkpoints").exists()


# ---------------------------------------------------------------- when it is time


@pytest.fixture
def guard():
    """One that hears no signals: what it was asked is set by the test."""
    found = Guard.__new__(Guard)
    found.num_asked = 0
    return found


def test_a_validation_is_remembered_however_long_ago_it_was():
    """Steps are forgotten after 64: with validations further apart, the next one would run into the end."""
    leaving = Leaving(None, None, 10.0, saved_bytes=0)
    leaving.validated(600.0)
    for _ in range(100):
        leaving.begin_step()
        leaving.end_step(0.0)
    leaving.validated(1.0)
    assert 610 <= leaving.needed_s < 611


def test_it_is_time_when_a_step_two_saves_and_the_margin_dont_fit_any_more(guard):
    def leaving(left_s):
        found = Leaving(guard, End(time.time() + left_s, "a test"), 10.0, saved_bytes=3 * ASSUMED_BYTES_S)
        return found

    assert leaving(17).urgency() == STAY and leaving(15).urgency() == LEAVE  # 2 * 3 s for a save that nobody has measured yet, and 10 s
    measured = leaving(12)
    measured.begin_step()
    time.sleep(0.1)
    measured.end_step(save_s=0.01)
    assert 10.2 < measured.needed_s < 12 and measured.urgency() == STAY


def test_once_it_is_time_it_stays_so_and_a_signal_is_as_urgent_as_often_as_it_came(guard):
    leaving = Leaving(guard, None, 60.0, 0.0)
    for num_asked, expected in ((0, STAY), (1, LEAVE), (2, HURRY), (3, HURRY)):
        guard.num_asked = num_asked
        assert leaving.urgency() == expected
    late = Leaving(guard, End(time.time() + 1, "a test"), 60.0, 0.0)
    guard.num_asked = 0
    assert late.urgency() == LEAVE and late.urgency() == LEAVE
    assert "stopped after step 7 with a checkpoint, " in late.told(7) and " (a test); start " in late.told(7)
    assert leaving.told(7) == "stopped after step 7 with a checkpoint; start the same command again to go on"
