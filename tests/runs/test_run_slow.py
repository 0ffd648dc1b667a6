"""A rank that is slowed down from outside, to half, is named; and so is a link.

Of ranks that are left alone none is.
"""

import re
import signal
import threading
import time

import hosts
import pytest
from conftest import LONG
from launch import MPITRAIN, started, tail, tiny, write_text

KEYS = dict(
    run_steps=100_000, run_eval_every=10_000, run_save_every=10_000, numerics_check_every=0, parallel_zero=0
)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("slow") / "text.txt", 60_000)


def slow_down(job, pid: int, over: threading.Event) -> None:
    """Let a process run for half of the time, by turns that are shorter than a step."""
    while not over.is_set():
        for number in (signal.SIGSTOP, signal.SIGCONT):
            job.signal(pid, number)
            time.sleep(0.004)


@LONG
def test_a_rank_slowed_by_half_is_named_and_nobody_before(tmp_path, text):
    keys = dict(KEYS, comm_slow_after=30, parallel_dp=2, model_width=64, model_ffn=128)
    with started(2, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys)) as job:
        job.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists(), 60)
        done = lambda: (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") - 1  # noqa: E731
        job.wait_for(lambda: done() >= 62, 120)
        before = re.findall(r"step +\d+: rank .* is slow", job.text())
        rank = job.ranks()[1]
        over = threading.Event()
        thread = threading.Thread(target=slow_down, args=(job, rank, over))
        thread.start()
        try:
            job.wait_for(
                lambda: (
                    re.search(r"step +\d+: rank 1 on \S+ is slow: busy [\d.]+ times", job.text()) is not None
                ),
                120,
            )
        finally:
            over.set()
            thread.join()
        print(tail(job.text(), 5))
        assert "rank 0 on" not in "".join(re.findall(r"step +\d+: rank .* is slow", job.text())), tail(
            job.text()
        )
        assert before == [], before


@pytest.mark.skipif(not hosts.CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces")
def test_a_link_slowed_to_a_tenth_is_named(tmp_path, text):
    keys = dict(KEYS, comm_slow_after=10, parallel_dp=2)
    with hosts.two_hosts(tmp_path, "1gbit") as pair:
        command = pair.mpirun(1, MPITRAIN, "run", *tiny(tmp_path / "run", text, **keys))
        with started(0, *command, env={"UCX_TLS": "tcp,self"}) as job:
            done = lambda: (tmp_path / "run" / "metrics.jsonl").read_bytes().count(b"\n") - 1  # noqa: E731
            job.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and done() >= 31, 120)
            assert "link between" not in job.text(), tail(job.text())
            pair.slow("100mbit")
            job.wait_for(lambda: "link between" in job.text(), 120)
            print(tail(job.text(), 5))
            assert re.search(
                r"step +\d+: link between \S+ \(rank 0\) and \S+ \(rank 1\): [\d.]+ MB/s, usual are",
                job.text(),
            )
