"""A node that the network has cut off: the run resumes on the others, and the bits are those of all.

MPITRAIN_NETNS=1 makes two nodes of network namespaces, each with a /dev/shm of its own; it needs root.
"""

import os
import re
import signal
import sys
from pathlib import Path

import pytest
from checkpoints import digest_of
from hosts import ADDRESSES, CHOSEN, two_hosts
from launch import MPITRAIN, is_mpich, lines_in, loss_lines, run_tiny, short, started, tail, tiny, write_text

pytestmark = [
    pytest.mark.skipif(not CHOSEN, reason="MPITRAIN_NETNS=1 makes two hosts of network namespaces"),
    pytest.mark.skipif(not is_mpich(), reason="the hosts are given in the words of MPICH's mpirun"),
]
STEPS = 60
SETTINGS = dict(
    parallel_dp=2, numerics_reproducible="layout", batch_global=4, batch_micro=1, run_steps=STEPS,
    run_save_every=0, run_eval_every=0,
)  # fmt: skip
LIMIT_S = 6
# Slurm's srun of an allocation of nodes that are named by their addresses
SRUN = """#!{python}
import os, socket, sys

nodes = next(word for word in sys.argv if word.startswith("--nodelist=")).split("=")[1].split(",")
if sys.argv[-1] == "true":
    try:
        socket.create_connection((nodes[0], 9), timeout=3)
    except ConnectionRefusedError:  # by the node, on which nothing listens
        sys.exit()
print("srun on", *nodes, flush=True)
launchers = {launchers}
command = [word for word in sys.argv[1:] if not word.startswith("--n")]
os.execvp(launchers[len(nodes)][0], launchers[len(nodes)] + command)
"""


def in_path(folder, monkeypatch, name, script):
    """Make a program that is found before others of its name."""
    program = folder / "bin" / name
    program.parent.mkdir(exist_ok=True)
    program.write_text(script)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")


def ranks_of(job):
    """Return the ranks of a supervised job."""
    words = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in job.ranks()}
    return [pid for pid, given in words.items() if b"run" in given and b"supervise" not in given]


@pytest.mark.parametrize("zero", [1, 3])
def test_a_run_goes_on_without_a_node_that_is_cut_off_and_has_it_back_later(tmp_path, monkeypatch, zero):
    text = write_text(tmp_path / "text.txt", 20_000)
    keys = SETTINGS | dict(parallel_zero=zero)
    whole = run_tiny(2, tmp_path / "whole", text, **keys)
    assert whole.returncode == 0, tail(whole.output)
    run_dir = tmp_path / "run"
    keys |= dict(recovery_every=1, recovery_shrink="true", comm_timeout_s=short(LIMIT_S))
    run = [MPITRAIN, "run", *tiny(run_dir, text, **keys)]
    with two_hosts(tmp_path) as hosts:
        launchers = {count: hosts.launcher(1, ADDRESSES[:count]) for count in (1, 2)}
        in_path(tmp_path, monkeypatch, "srun", SRUN.format(python=sys.executable, launchers=launchers))
        in_path(tmp_path, monkeypatch, "scontrol", f"#!/bin/sh\nprintf '%s\\n' {' '.join(ADDRESSES)}\n")
        monkeypatch.setenv("SLURM_JOB_NODELIST", "site")
        command = hosts.on_first(MPITRAIN, "supervise", "--nodes", "2", "srun", *run)
        with started(0, *command, env={"UCX_TLS": "tcp,self"}, forked=False) as job:
            job.wait_for(lambda: lines_in(run_dir) >= 5, 90)
            hosts.cut()
            job.wait_for(lambda: "start 2" in job.text(), LIMIT_S + 40)
            job.wait_for(lambda: "resuming after step" in job.text(), 60)
            now = lines_in(run_dir)
            job.wait_for(lambda: lines_in(run_dir) >= now + 3, 60)
            hosts.mend()
            job.signal(ranks_of(job)[0], signal.SIGKILL)
            done = job.wait(120)
            left = ranks_of(job)
    said = tail(done.output, 40)
    assert done.returncode == 0 and not left, said
    on = [line.split()[2:] for line in done.output.splitlines() if line.startswith("srun on")]
    first, second = ADDRESSES
    assert on == [[first, second], [first], [first, second]], said
    assert "doesn't answer: it is down, or the network to it" in done.output, said
    assert f"excluded {second}, without an answer" in done.output, said
    assert len(re.findall("resuming after step [0-9]+ of /dev/shm/", done.output)) == 2, said
    assert loss_lines(run_dir) == loss_lines(tmp_path / "whole"), said
    assert digest_of(run_dir / "checkpoints", STEPS) == digest_of(tmp_path / "whole/checkpoints", STEPS), said
