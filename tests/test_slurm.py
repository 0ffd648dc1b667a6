"""Under a real Slurm a run is begun, thrown out and begun again until it is done, and has the loss lines of one long run.

With MPITRAIN_SLURM=1, as root, with Debian's slurm-wlm and munge: about three minutes for each launcher.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launch import HERE, MPITRAIN, TINY, loss_lines, mpirun, options, tail, write_text
from slurm import ENDED, missing, slurm

pytestmark = pytest.mark.skipif("MPITRAIN_SLURM" not in os.environ, reason="MPITRAIN_SLURM=1 starts a Slurm")
MPICH = (HERE / "mpichversion").exists()
LAUNCHERS = ["srun --mpi=pmi2", "mpirun -n 2"] if MPICH else ["mpirun -n 2"]  # Open MPI's wheel knows PMIx only, Debian's Slurm has none
LIMIT_S, MARGIN_S = 60, 40  # the shortest that Slurm has; leaves after a third of it
SETTINGS = {
    **{key: value for key, value in TINY.items() if key != "run.steps"},
    "batch.global": 64,  # slow enough that there aren't thousands of steps to compare
    "run.eval_every": 50,
    "run.save_every": 10,
    "run.time_margin_s": MARGIN_S,
    "schedule.name": "constant",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.fail(missing())
    with slurm(tmp_path_factory.mktemp("slurm")) as found:
        yield found


class Training:
    """A job that `mpitrain job` has written and submitted. steps: of the run, which change while it is queued."""

    def __init__(self, cluster, folder: Path, launch: str):
        self.cluster, self.folder, self.run_dir = cluster, folder, folder / "runs/my"
        self.text = write_text(folder / "text.txt")
        self.train_for(10**6)
        sets = options({**SETTINGS, "data.path": self.text, "parallel.pp": 2})
        job = [MPITRAIN, "job", "slurm", "my.toml", "--nodes=1", "--ranks-per-node=2", "--cores=1", "--time=0:01:00"]
        said = cluster.run(*job, f"--launch={launch}", *sets, "--submit", cwd=folder)
        self.job = said.split()[-1]
        assert f"Submitted batch job {self.job}" in said

    def train_for(self, steps: int) -> None:
        (self.folder / "my.toml").write_text(f"[run]\nsteps = {steps}\n")

    def ends(self) -> list[dict]:
        path = self.run_dir / "ends.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def console(self) -> str:
        path = self.folder / f"my-{self.job}.out"
        return path.read_text() if path.exists() else "no console yet"

    def wait_for_end(self, number: int, code: int | None) -> None:
        """Wait until the run has ended for the `number`th time. code: None for any that tells of a failure."""
        self.wait_for(f"end {number}", lambda: len(self.ends()) == number)
        found = self.ends()[-1]["code"]
        assert found == code or (code is None and found not in (0, 2, 75)), self.console()

    def wait_for_start(self, number: int) -> None:
        """Wait until the run has taken some steps after its `number`th start."""
        steps = self.ends()[-1]["step"] + 3

        def stepping():
            return self.console().count("val loss before training") + self.console().count("going on after") == number

        self.wait_for(f"start {number}", lambda: stepping() and len(loss_lines(self.run_dir)) > steps)

    def wait_for(self, what: str, ready: Callable[[], object]) -> None:
        """Wait for something while the job lives."""

        def over():
            return ready() or (self.cluster.state(self.job) in ENDED and not ready())

        self.cluster.wait_for(what, over, LIMIT_S + 60, self.console)
        assert ready(), f"{what}: the job is {self.cluster.state(self.job)}\n{self.console()}"

    def a_rank(self) -> int:
        """Return the process of rank 1."""
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                found, command = path.read_bytes().split(b"\0"), path.with_name("cmdline").read_bytes()
            except OSError:
                continue
            names = (b"PMI_RANK=1", b"OMPI_COMM_WORLD_RANK=1")
            if f"SLURM_JOB_ID={self.job}".encode() in found and any(name in found for name in names) and b"mpitrain\0run" in command:
                return int(path.parent.name)
        raise AssertionError(f"no rank 1 of job {self.job}\n{self.console()}")


@pytest.mark.parametrize("launch", LAUNCHERS)
def test_a_job_comes_again_until_it_is_done(cluster, tmp_path, launch):
    training = Training(cluster, tmp_path, launch)
    for number in (1, 2):
        training.wait_for_end(number, code=75)  # its time
    training.wait_for_start(3)
    cluster.run("scancel", "--signal=USR1", *["--batch"] * (launch.startswith("mpirun")), training.job)
    training.wait_for_end(3, code=75)
    training.wait_for_start(4)
    training.train_for(training.ends()[-1]["step"] + 30)
    os.kill(training.a_rank(), signal.SIGKILL)
    training.wait_for_end(4, code=None)
    cluster.wait_for("the end of the job", lambda: cluster.state(training.job) in ENDED, LIMIT_S + 60, training.console)
    console = training.console()
    assert cluster.state(training.job) == "COMPLETED" and "mpitrain job: done" in console, console
    assert console.count("(squeue)") + console.count("(SLURM_JOB_END_TIME)") >= 2, console  # who knew the end
    assert "the process is gone: killed" in console, console
    steps = [end["step"] for end in training.ends()]
    assert len(steps) >= 4 and steps == sorted(steps) and len(set(steps[:3])) == 3, steps  # on a busy machine its time is over once more
    logs = sorted(path.name for path in (training.run_dir / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]
    assert all((training.run_dir / "logs" / name).read_text().count(f", job {training.job}\n") == len(steps) + 1 for name in logs)

    whole = {**SETTINGS, "data.path": training.text, "run.dir": tmp_path / "whole", "run.save_every": 0}
    whole["run.steps"] = len(loss_lines(training.run_dir)) - 1
    done = mpirun(1, MPITRAIN, "run", *options(whole), timeout=300)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(training.run_dir) == loss_lines(tmp_path / "whole")


@pytest.mark.parametrize("launch", ["srun --mpi=none"])
def test_a_launcher_that_starts_singletons_is_refused_and_the_job_doesnt_come_again(cluster, tmp_path, launch):
    training = Training(cluster, tmp_path, launch)
    cluster.wait_for("the end of the job", lambda: cluster.state(training.job) in ENDED, LIMIT_S + 60, training.console)
    console = training.console()
    assert cluster.state(training.job) == "FAILED" and "MeshError: Slurm started 2 ranks" in console, console
    assert "mpitrain job: not again: the run was refused (exit code 2)" in console and not training.run_dir.exists()


def test_a_cancelled_job_doesnt_come_again(cluster, tmp_path):
    training = Training(cluster, tmp_path, LAUNCHERS[0])
    cluster.wait_for("steps", lambda: training.run_dir.exists() and "step     1" in training.console(), 60, training.console)
    subprocess.run(["scancel", training.job], env=cluster.environment, check=True)
    cluster.wait_for("the end of the job", lambda: cluster.state(training.job) in ENDED, LIMIT_S, training.console)
    assert cluster.state(training.job) == "CANCELLED", training.console()
