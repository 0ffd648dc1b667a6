"""Under a real Slurm a job with a spare node survives a rank, and a node that is lost.

It has the losses of one long run. With MPITRAIN_SLURM=1, as root, with Debian's slurm-wlm and munge:
about two minutes. The three nodes are daemons of this machine.
"""

import os
import signal

import pytest
from launch import HERE, MPITRAIN, lines_in, loss_lines, mpirun, options, tail
from slurm import ENDED, SETTINGS, Training, missing, slurm

pytestmark = [
    pytest.mark.skipif("MPITRAIN_SLURM" not in os.environ, reason="MPITRAIN_SLURM=1 starts a Slurm"),
    pytest.mark.skipif(not (HERE / "mpichversion").exists(), reason="Debian's Slurm has no PMIx"),
]
MORE = 25  # steps after the last loss


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.fail(missing())
    with slurm(tmp_path_factory.mktemp("slurm"), names=("n1", "n2", "n3")) as found:
        yield found


def test_a_job_with_a_spare_node_survives_a_rank_and_a_node(cluster, tmp_path):
    layout = dict(parallel_pp=1, parallel_dp=2, run_save_every=10**5)
    asked = "--nodes=2", "--spare=1", "--ranks-per-node=1"
    training = Training(
        cluster, tmp_path, "srun --mpi=pmi2", minutes=15, asked=asked, recovery_every=1, **layout
    )
    training.wait_for_start(1)
    os.kill(training.a_rank(), signal.SIGKILL)
    training.wait_for_start(2)
    training.train_for(lines_in(training.run_dir) + MORE)
    cluster.lose_node("n2")
    cluster.wait_for("the end", lambda: cluster.state(training.job) in ENDED, 240, training.console)
    console = training.console()
    assert "the process is gone: killed" in console and "excluded n2, without an answer" in console, console
    assert console.count("resuming after step") == 2 and "mpitrain supervise: done" in console, console

    whole = {
        **SETTINGS, "data.path": training.text, "run.dir": tmp_path / "whole", "parallel.dp": 2,
        "run.save_every": 0, "run.steps": len(loss_lines(training.run_dir)) - 1,
    }  # fmt: skip
    done = mpirun(2, MPITRAIN, "run", *options(whole), timeout=300)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(training.run_dir) == loss_lines(tmp_path / "whole")
