"""With run.logs each rank writes to a log of its own in the run directory, the first one to the
console as well.
"""

import os
import re

import pytest
from conftest import LONG
from launch import MPITRAIN, planted, run_tiny, started, tail, tiny, write_text

SETTINGS = dict(run_steps=3, run_eval_every=0, parallel_pp=2, run_logs="true")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("logs") / "text.txt")


def test_each_start_adds_to_the_log_of_each_rank_and_the_end_is_reported_on_the_console(tmp_path, text):
    run_dir = tmp_path / "run"
    done = run_tiny(2, run_dir, text, **SETTINGS, env={"SLURM_JOB_ID": "17"})
    assert done.returncode == 0 and "\x1b" not in done.output, tail(done.output)
    report = "failed in phase build, .*: RuntimeError: planted"
    env = planted({"rank": 1, "phase": "build", "call": 5, "fault": "exception"})
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, **SETTINGS | {"run_steps": 5}), env=env) as job:
        failed = job.wait(60)
    assert failed.returncode == 1 and re.search(report, failed.output), tail(failed.output)
    first, second = ((run_dir / f"logs/rank-0000{rank}.log").read_text() for rank in range(2))
    headings = re.findall(
        r"^---- .*: rank (\d) of 2, process \d+ on \S+?(, job 17)?$", first + second, re.MULTILINE
    )
    assert headings == [("0", ", job 17"), ("0", ""), ("1", ", job 17"), ("1", "")]
    lines = [line for line in done.output.splitlines() if "  step " in line or line.startswith("done: ")]
    assert lines and all(f"{line}\n" in first for line in lines) and "step " not in second


STAMPED = (
    r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)  step +(\d+)  loss .*  (\S+) left  .* tokens/s .*  ([\d.]+) s a "
    r"step  ([\d,]+) tokens so far$"
)


def test_a_line_comes_every_so_many_steps_with_its_time_and_what_is_left(tmp_path, text):
    """The first step of a start and the last one have a line, too, and those that are validated.

    8 sequences of 32 tokens a step.
    """
    settings = SETTINGS | dict(
        run_steps=11, run_log_every=3, run_eval_every=5, run_save_every=0, run_logs="false"
    )
    done = run_tiny(2, tmp_path / "run", text, **settings)
    found = re.findall(STAMPED, done.output, re.MULTILINE)
    assert [int(step) for _, step, *_ in found] == [1, 3, 5, 6, 9, 10, 11], tail(done.output)
    assert all(int(tokens.replace(",", "")) == 8 * 32 * int(step) for _, step, *_, tokens in found), found
    assert found[-1][2] == "0:00:00" and all(float(seconds) < 60 for *_, seconds, _ in found), found


@LONG
def test_a_start_with_more_ranks_than_cores_says_what_to_set(tmp_path, text):
    """Not where it is set, nor with a core for each rank."""
    ranks = os.cpu_count() + 1
    names = ("MPIR_CVAR_POLLS_BEFORE_YIELD", "OMPI_MCA_mpi_yield_when_idle")
    settings = dict(run_steps=1, parallel_dp=ranks, batch_global=ranks, run_eval_every=0, run_save_every=0)
    unset = run_tiny(ranks, tmp_path / "unset", text, **settings, env=dict.fromkeys(names))
    as_set = run_tiny(ranks, tmp_path / "set", text, **settings)
    said = f"{ranks} ranks on {ranks - 1} cores: set "
    assert unset.returncode == as_set.returncode == 0, tail(unset.output) + tail(as_set.output)
    assert said in unset.output and said not in as_set.output, tail(unset.output)


@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO"])
def test_a_log_that_leads_elsewhere_is_refused(tmp_path, text, kind):
    """Opening a FIFO would wait for somebody to read it."""
    run_dir = tmp_path / "run"
    other = tmp_path / "other"
    log = run_dir / "logs/rank-00000.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log) if kind == "a FIFO" else log.symlink_to(other)
    done = run_tiny(1, run_dir, text, **SETTINGS | {"parallel_pp": 1}, timeout=30)
    assert (
        done.returncode == 2
        and f"rank-00000.log cannot be written: it is {kind}, needed a regular" in done.output
    ), tail(done.output)
    assert not other.exists() and not list(run_dir.glob("run.lock*"))
