"""A rank that is stopped at any moment, in any layout, is named with its instruction and its node,
and the job ends.

MPITRAIN_EFFORT=50 stops as many; by default there is one.
"""

import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import hosts
import pytest
import rank_positions
from conftest import LONG
from effort import numbers
from launch import (
    MPIRUN,
    MPITRAIN,
    lines_in,
    mpirun,
    planted,
    preloaded,
    short,
    started,
    tail,
    tiny,
    write_text,
)

LIMIT_S = 4
LAYOUTS = (  # ranks, on two nodes, keys; the first tell most
    (4, True, dict(parallel_pp=2, parallel_tp=2, parallel_dp=1)),
    (2, False, dict(parallel_dp=2, parallel_zero=3)),
    (4, False, dict(parallel_pp=2, parallel_dp=2, pipeline_schedule="interleaved", pipeline_chunks=2)),
    (2, False, dict(parallel_cp=2)),
    (2, True, dict(parallel_pp=2, pipeline_schedule="zbv", comm_progress="thread")),
)
STOPS = numbers(range(1), 50)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("hang") / "text.txt", 20_000)


def several_nodes(num_ranks: int) -> list[str]:
    """Return options of a launcher that makes two nodes of one machine, as MPICH's does; else none."""
    if b"HYDRA" not in subprocess.run([MPIRUN, "--version"], capture_output=True, check=False).stdout:
        return []
    return ["-launcher", "fork", "-hosts", f"n0:{num_ranks // 2},n1:{num_ranks // 2}"]


@pytest.mark.parametrize("number", STOPS)
def test_a_rank_stopped_at_any_moment_is_named_with_its_instruction(tmp_path, text, number):
    dice = random.Random(number)
    num_ranks, apart, keys = LAYOUTS[number % len(LAYOUTS)]
    given = tiny(
        tmp_path / "run",
        text,
        run_steps=100_000,
        run_eval_every=20,
        run_save_every=20,
        comm_timeout_s=short(LIMIT_S),
        **keys,
    )
    nodes = several_nodes(num_ranks) if apart else []
    program = preloaded([sys.executable, rank_positions.__file__, str(tmp_path), "run", *given])
    with started(0, MPIRUN, *nodes, "-n", str(num_ranks), *program) as job:
        job.wait_for(lambda: lines_in(tmp_path / "run") >= 3, 90)
        time.sleep(2 * dice.random())
        rank = dice.randrange(num_ranks)
        (path,) = tmp_path.glob(f"{rank}.*")
        pid = int(path.suffix[1:])
        job.signal(pid, signal.SIGSTOP)
        job.wait_for(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", 5)
        where = rank_positions.read(path)
        done = job.wait(LIMIT_S + 10)
    assert done.returncode not in (0, None), tail(done.output)
    print(tail(done.output, 12))
    reports = [line for line in done.output.splitlines() if line.startswith("mpitrain: ")]
    named = [line for line in reports if re.search("cause of the hang|stuck for", line)]
    assert len(named) == 1, tail(done.output)
    assert re.search(rf"rank {rank} \(pp \d+, .*\) on {re.escape(os.uname().nodename)} ", named[0]), tail(
        done.output
    )
    there = "|".join(map(re.escape, where))  # and what a thread that saves does meanwhile
    assert re.search(rf"({there})(, meanwhile .*)?(, for |: stuck)", named[0]), (
        f"{where}\n{tail(done.output)}"
    )
    assert "stopped by a signal (SIGSTOP)" in named[0], named[0]


@LONG
def test_the_stack_that_is_shown_is_that_of_the_rank_behind_and_no_other(tmp_path, text):
    """It sleeps in a call of its own: faulthandler names the function that was called to plant it."""
    env = planted({"rank": 1, "phase": "step", "call": 3000, "fault": "slow"})
    given = tiny(tmp_path / "run", text, run_steps=1000, comm_timeout_s=short(LIMIT_S), parallel_pp=2)
    done = mpirun(2, MPITRAIN, "run", *given, env=env, timeout=60)
    assert done.returncode not in (0, None) and "planted slow" in done.output, tail(done.output)
    assert re.search(
        r"cause of the hang: rank 1 \(pp 1, .* it waits for no message: it computes or is stuck", done.output
    ), tail(done.output)
    assert done.output.count("most recent call first") == 1 and "in <lambda>" in done.output, tail(
        done.output
    )


@pytest.mark.skipif(not hosts.CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces")
def test_a_cut_link_ends_the_job_with_a_report(tmp_path, text):
    """Neither half knows more than that the other doesn't answer; each says so, and ends its ranks."""
    keys = dict(
        run_steps=100_000,
        run_eval_every=1000,
        run_save_every=1000,
        comm_timeout_s=short(LIMIT_S),
        parallel_pp=2,
        parallel_tp=2,
    )
    with hosts.two_hosts(tmp_path) as pair:
        command = pair.mpirun(2, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys))
        with started(0, *command, env={"UCX_TLS": "tcp,self"}) as job:
            job.wait_for(lambda: lines_in(tmp_path / "run") >= 3, 90)
            pair.cut()
            done = job.wait(LIMIT_S + 20)
            print(tail(done.output, 12))
    assert done.returncode not in (0, None), tail(done.output)
    assert "waited" in done.output and "doesn't answer: it is down, or the network to it" in done.output, (
        tail(done.output)
    )


def watchdog_of(ranks):
    """Return the watchdog's process, whose words have the number of the rank that has started it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            name, *words = path.read_bytes().split(b"\0")
            if name == b"mpitrain-watchdog" and {int(word) for word in words if word.isdigit()} & {*ranks}:
                return int(path.parent.name)
    raise AssertionError("the ranks have no watchdog")


def test_a_node_that_was_suspended_for_longer_than_the_limit_goes_on(tmp_path, text):
    """All processes of a job stand still, its launcher and its watchdog too."""
    run_dir = tmp_path / "run"
    limit_s = min(short(2), 6)
    given = tiny(run_dir, text, parallel_dp=2, run_steps=40, comm_timeout_s=limit_s)
    with started(2, MPITRAIN, "run", *given) as job:
        job.wait_for(lambda: lines_in(run_dir) >= 4, 60)
        processes = [job.process.pid, *job.ranks(), watchdog_of(job.ranks())]
        for number, wait_s in ((signal.SIGSTOP, 2 * limit_s), (signal.SIGCONT, 0)):
            for pid in processes:
                os.kill(pid, number)
            time.sleep(wait_s)
        done = job.wait(60)
    assert done.returncode == 0 and lines_in(run_dir) == 40, tail(done.output)
