"""With run.logs each rank writes to a log of its own in the run directory, the first one to the console as well."""

import os
import re

import pytest
from launch import MPITRAIN, planted, run_tiny, started, tail, tiny, write_text

SETTINGS = dict(run_steps=3, run_eval_every=0, parallel_pp=2, run_logs="true")


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("logs") / "text.txt")


def test_each_start_adds_to_the_log_of_each_rank_and_the_end_is_told_on_the_console(tmp_path, text):
    run_dir = tmp_path / "run"
    done = run_tiny(2, run_dir, text, **SETTINGS, env={"SLURM_JOB_ID": "17"})
    assert done.returncode == 0 and "\x1b" not in done.output, tail(done.output)
    report = "failed in phase build, .*: RuntimeError: planted"
    env = planted({"rank": 1, "phase": "build", "call": 5, "fault": "exception"})
    with started(2, MPITRAIN, "run", *tiny(run_dir, text, **SETTINGS | {"run_steps": 5}), env=env) as job:
        failed = job.wait(60)
    assert failed.returncode == 1 and re.search(report, failed.output), tail(failed.output)
    first, second = ((run_dir / f"logs/rank-0000{rank}.log").read_text() for rank in range(2))
    headings = re.findall(r"^---- .*: rank (\d) of 2, process \d+ on \S+?(, job 17)?$", first + second, re.MULTILINE)
    assert headings == [("0", ", job 17"), ("0", ""), ("1", ", job 17"), ("1", "")]
    lines = [line for line in done.output.splitlines() if line.startswith(("step ", "done: "))]
    assert lines and all(f"{line}\n" in first for line in lines) and "step " not in second


@pytest.mark.parametrize("kind", ["a symbolic link", "a FIFO"])
def test_a_log_that_leads_elsewhere_is_refused(tmp_path, text, kind):
    """Opening a FIFO would wait for somebody to read it."""
    run_dir, other = tmp_path / "run", tmp_path / "other"
    log = run_dir / "logs/rank-00000.log"
    log.parent.mkdir(parents=True)
    os.mkfifo(log) if kind == "a FIFO" else log.symlink_to(other)
    done = run_tiny(1, run_dir, text, **SETTINGS | {"parallel_pp": 1}, timeout=30)
    assert done.returncode == 2 and f"rank-00000.log cannot be written: it is {kind}, needed a regular" in done.output, tail(done.output)
    assert not other.exists() and not list(run_dir.glob("run.lock*"))
