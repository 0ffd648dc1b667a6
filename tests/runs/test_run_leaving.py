"""A run leaves in time: with a checkpoint before its allocation ends, at once when asked twice, and
without one when three times.
"""

import json
import re
import signal
import sys
import time
from contextlib import contextmanager

import pytest
import rank_positions
from conftest import LONG, but_for
from launch import (
    MPITRAIN,
    lines_in,
    loss_lines,
    mpirun,
    run_tiny,
    short,
    slowness,
    started,
    tail,
    tiny,
    write_text,
)

from mpitrain.cluster.allocation import Allotted, end_after
from mpitrain.cluster.leave_requests import ECHO_S, LeaveRequests
from mpitrain.training.early_exit import ASSUMED_BYTES_S, HURRY, LEAVE, STAY, Leaving

IGNORING = """
import os, signal, sys
for number in (signal.SIGHUP, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
SETTINGS = dict(schedule_name="constant", run_eval_every=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("leaving") / "text.txt")


def command(run_dir, text, **changes):
    return [MPITRAIN, "run", *tiny(run_dir, text, parallel_pp=2, **SETTINGS | changes)]


def saved(run_dir):
    return sorted(
        path.name for path in (run_dir / "checkpoints").glob("step-*") if re.fullmatch(r"step-\d+", path.name)
    )


SET = """
import os, runpy, sys, time
metrics, *words = sys.argv[1:]
of_day = time.time

def set_twice():  # a day forward, later back by two
    steps = open(metrics).read().count("\\n") if os.path.exists(metrics) else 0
    return of_day() + (0 if steps < 20 else 86400 if steps < 40 else -86400)

time.time = set_twice
sys.argv = ["mpitrain", *words]
runpy.run_module("mpitrain", run_name="__main__")
"""


def test_a_time_of_day_that_is_set_ends_no_run_and_breaks_no_report(tmp_path, text):
    metrics = tmp_path / "run/metrics.jsonl"
    limits = dict(run_time_limit="1:00:00", comm_timeout_s=short(30), run_steps=60, run_save_every=20)
    _, *words = command(tmp_path / "run", text, **limits)
    (tmp_path / "set.py").write_text(SET)
    done = mpirun(2, sys.executable, str(tmp_path / "set.py"), str(metrics), *words)
    assert done.returncode == 0, tail(done.output)
    assert saved(tmp_path / "run")[-1] == "step-00000060"
    times = [json.loads(line)["time"] for line in metrics.read_text().splitlines()]
    jumps = [after > before for before, after in zip(times, times[1:]) if abs(after - before) > 3600]
    assert jumps == [True, False], times
    report = mpirun(0, MPITRAIN, "report", str(tmp_path / "run"), cwd=tmp_path)
    assert report.returncode == 0, tail(report.output)


@LONG
def test_a_run_leaves_before_its_time_is_over_and_resumes_with_the_same_bits(tmp_path, text):
    limit_s = 9 * slowness()
    margin_s = 4 * slowness()
    mpirun(1, MPITRAIN, "--version")  # libraries are loaded once, which takes a while
    ends = {"MPITRAIN_JOB_END": str(int(time.time() + limit_s))}
    endless = command(tmp_path / "run", text, run_steps=10**6, run_save_every=0, run_time_margin_s=margin_s)
    with started(2, *endless, env=ends) as job:
        done = job.wait(60)
    assert done.returncode == 75, tail(done.output)
    (step,) = re.findall(
        r"stopped after step (\d+) with a checkpoint, (?:\d+) s before .* \(MPITRAIN_JOB_END\)", done.output
    )
    assert saved(tmp_path / "run") == [f"step-{int(step):08d}"]
    again, whole = (dict(run_steps=int(step) + 3, parallel_pp=ranks, **SETTINGS) for ranks in (2, 1))
    done = run_tiny(2, tmp_path / "run", text, **again)
    assert done.returncode == 0 and f"resuming after step {step}" in done.output, tail(done.output)
    done = run_tiny(1, tmp_path / "whole", text, **whole)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(tmp_path / "run") == loss_lines(tmp_path / "whole")


def asked(job, pid):
    """Ask a rank to leave, as a scheduler does: twice at once is one request."""
    for _ in range(2):
        if pid in job.ranks():  # it may have left for the first of the two
            job.signal(pid, signal.SIGUSR1)
        time.sleep(0.2)
    # what is heard late must not make the next request an echo of this one
    time.sleep(ECHO_S + slowness())


@contextmanager
def validating(run_dir, text):
    """Start a run whose validation after step 2 takes for ever, and wait until both ranks are in it."""
    # no sequence counts twice, and none that is trained on
    others = run_dir.with_name("others.txt")
    others.write_text("".join(f"line {number}, which nobody is trained on\n" for number in range(500_000)))
    long = dict(data_val_path=others, **SETTINGS)
    done = run_tiny(2, run_dir, text, parallel_pp=2, run_steps=1, **long)
    assert done.returncode == 0, tail(done.output)
    notes = run_dir.with_name("notes")
    notes.mkdir()
    endless = command(run_dir, text, run_eval_batches=10**6, **long | {"run_eval_every": 2})
    program = sys.executable, rank_positions.__file__, str(notes), *endless[1:]
    with started(2, *program) as job:
        job.wait_for(
            lambda: (
                sum("in phase validation" in min(rank_positions.read(path)) for path in notes.iterdir()) == 2
            ),
            60,
        )
        yield job


@LONG
def test_a_second_signal_hurries(tmp_path, text):
    run_dir = tmp_path / "run"
    with validating(run_dir, text) as job:
        for _ in range(2):
            asked(job, job.ranks()[0])
        done = job.wait(20)
    assert done.returncode == 75, tail(done.output)
    assert (
        saved(run_dir) == ["step-00000001", "step-00000002"]
        and "stopped after step 2 with a checkpoint" in done.output
    )
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1, 2] and "val_loss" not in lines[2]


@LONG
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
    assert saved(run_dir) == ["step-00000001"]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("name", "num_ranks"),
    but_for([("INT", 0), ("HUP", 0), ("INT", 2), ("HUP", 2)], longer=[("INT", 0), ("HUP", 2)]),
)
def test_ctrl_c_and_a_closed_terminal_ask_a_run_to_leave_with_a_checkpoint(tmp_path, text, num_ranks, name):
    run_dir = tmp_path / "run"
    settings = SETTINGS | dict(run_steps=10**6, run_save_every=0, parallel_pp=max(1, num_ranks))
    endless = [MPITRAIN, "run", *tiny(run_dir, text, **settings)]
    with started(num_ranks, *endless) as job:
        job.wait_for(lambda: lines_in(run_dir) > 0, 60)
        for pid in job.ranks():
            job.signal(pid, getattr(signal, f"SIG{name}"))
        done = job.wait(30)
    assert done.returncode == 75 and "Traceback" not in done.output, tail(done.output)
    (step,) = re.findall(r"stopped after step (\d+) with a checkpoint", done.output)
    said = [line for line in done.output.splitlines() if line.startswith("mpitrain: asked to leave")]
    assert len(said) == 2 and said[0].startswith(
        f"mpitrain: asked to leave (SIG{name}): the run ends after this step"
    ), said
    assert said[1] == f"mpitrain: asked to leave (SIG{name}); step {step} is saved"
    assert saved(run_dir) == [f"step-{int(step):08d}"]


@LONG
def test_a_second_ctrl_c_ends_a_run_at_once_and_says_what_is_saved(tmp_path, text):
    run_dir = tmp_path / "run"
    with validating(run_dir, text) as job:
        first, _ = job.ranks()
        for _ in range(2):
            job.signal(first, signal.SIGINT)
            time.sleep(ECHO_S + slowness())
        done = job.wait(20)
    assert done.returncode == 75 and done.output.count("was asked to leave") == 1, tail(done.output)
    # the second request lets the step hurry, which may be done before the end
    if "stopped after step 2 with a checkpoint" in done.output:
        assert saved(run_dir) == ["step-00000001", "step-00000002"]
    else:
        assert "run the same command to resume; step 1 is saved" in done.output
        assert saved(run_dir) == ["step-00000001"]


@LONG
def test_what_a_shell_ignores_for_a_run_in_the_background_ends_none(tmp_path, text):
    """nohup has SIGHUP ignored, and a script's `mpitrain run &` SIGINT."""
    run_dir = tmp_path / "run"
    words = tiny(run_dir, text, **SETTINGS | dict(run_steps=10**6, run_save_every=0))
    ignoring = [sys.executable, "-c", IGNORING, MPITRAIN, "run", *words]
    with started(0, *ignoring, forked=False) as job:
        job.wait_for(lambda: lines_in(run_dir) > 0, 90)
        (rank,) = job.ranks()
        for name in (signal.SIGHUP, signal.SIGINT):
            job.signal(rank, name)
        before = lines_in(run_dir)
        job.wait_for(lambda: lines_in(run_dir) > before + 3, 60)
        job.signal(rank, signal.SIGUSR1)
        done = job.wait(30)
    assert done.returncode == 75, tail(done.output)
    assert "asked to leave (SIGUSR1); step" in done.output, tail(done.output)


# ---------------------------------------------------------------- when it is time


@pytest.fixture
def requests():
    return LeaveRequests()


def timed(requests, left_s, margin_s=0.0):
    requests.time = Allotted(end_after(left_s, "a test"), margin_s)
    return requests


def test_a_validation_is_remembered_however_long_ago_it_was(requests):
    """Steps are forgotten after 64: with validations further apart, the next one would run into the end."""
    leaving = Leaving(timed(requests, 3600, 10.0), saved_bytes=0)
    leaving.validated(600.0)
    for _ in range(100):
        leaving.begin_step()
        leaving.end_step(0.0)
    leaving.validated(1.0)
    assert 610 <= leaving.needed_s < 611


def test_it_is_time_when_a_step_two_saves_and_the_margin_dont_fit_any_more(requests):
    def leaving(left_s):
        return Leaving(timed(requests, left_s, 10.0), saved_bytes=3 * ASSUMED_BYTES_S)

    # 2 * 3 s for a save that nobody has measured yet, and 10 s
    assert leaving(17).urgency() == STAY
    late = leaving(17)
    late.validated(5)
    # nothing but the save fits any more
    assert late.urgency() == LEAVE and leaving(15).urgency() == HURRY
    measured = leaving(12)
    measured.begin_step()
    time.sleep(0.1)
    measured.end_step(save_s=0.01)
    assert 10.2 < measured.needed_s < 12 and measured.urgency() == STAY


def test_once_it_is_time_it_stays_so_and_a_signal_is_as_urgent_as_often_as_it_came(requests):
    leaving = Leaving(requests, 0.0)
    for num_asked, expected in ((0, STAY), (1, LEAVE), (2, HURRY), (3, HURRY)):
        requests.num_asked = num_asked
        assert leaving.urgency() == expected
    requests.num_asked = 0
    late = Leaving(timed(requests, 70, 60.0), 0.0)
    late.validated(20)
    assert late.urgency() == LEAVE
    late.validated(0)
    assert late.urgency() == LEAVE
    assert "stopped after step 7 with a checkpoint, " in late.describe(
        7
    ) and " (a test); run " in late.describe(7)
    assert leaving.describe(7) == "stopped after step 7 with a checkpoint; run the same command to resume"
