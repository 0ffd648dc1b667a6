"""Under a real Slurm a run is started, preempted and restarted until it is done, and has the loss
lines of one long run.

With MPITRAIN_SLURM=1, as root, with Debian's slurm-wlm and munge: about three minutes for each
launcher.
"""

import os
import re
import signal
import subprocess

import pytest
from launch import HERE, MPITRAIN, loss_lines, mpirun, options, run_tiny, tail, tiny, write_text
from slurm import ENDED, LIMIT_S, SETTINGS, Training, missing, slurm

pytestmark = pytest.mark.skipif("MPITRAIN_SLURM" not in os.environ, reason="MPITRAIN_SLURM=1 starts a Slurm")
MPICH = (HERE / "mpichversion").exists()
# Open MPI's wheel knows PMIx only, Debian's Slurm has none
LAUNCHERS = ["srun --mpi=pmi2", "mpirun -n 2"] if MPICH else ["mpirun -n 2"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    if missing():
        pytest.fail(missing())
    # a script waits for the one that it submits
    with slurm(tmp_path_factory.mktemp("slurm"), cpus=4) as found:
        yield found


@pytest.mark.parametrize("launch", LAUNCHERS)
def test_a_job_restarts_until_it_is_done(cluster, tmp_path, launch):
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
    cluster.wait_for(
        "the end of the job", lambda: cluster.state(training.job) in ENDED, LIMIT_S + 60, training.console
    )
    console = training.console()
    assert cluster.state(training.job) == "COMPLETED" and "mpitrain job: done" in console, console
    # who knew the end
    assert console.count("(squeue)") + console.count("(SLURM_JOB_END_TIME)") >= 2, console
    assert "the process is gone: killed" in console, console
    steps = [end["step"] for end in training.ends()]
    # on a busy machine its time is over once more
    assert len(steps) >= 4 and steps == sorted(steps) and len(set(steps[:3])) == 3, steps
    logs = sorted(path.name for path in (training.run_dir / "logs").iterdir())
    assert logs == ["rank-00000.log", "rank-00001.log"]
    assert all(
        (training.run_dir / "logs" / name).read_text().count(f", job {training.job}\n") == len(steps) + 1
        for name in logs
    )

    whole = {**SETTINGS, "data.path": training.text, "run.dir": tmp_path / "whole", "run.save_every": 0}
    whole["run.steps"] = len(loss_lines(training.run_dir)) - 1
    done = mpirun(1, MPITRAIN, "run", *options(whole), timeout=300)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(training.run_dir) == loss_lines(tmp_path / "whole")


@pytest.mark.parametrize("launch", ["srun --mpi=none"])
def test_a_launcher_that_starts_singletons_is_refused_and_the_job_doesnt_restart(cluster, tmp_path, launch):
    training = Training(cluster, tmp_path, launch)
    cluster.wait_for(
        "the end of the job", lambda: cluster.state(training.job) in ENDED, LIMIT_S + 60, training.console
    )
    console = training.console()
    assert cluster.state(training.job) == "FAILED" and "MeshError: srun started 2 ranks" in console, console
    assert (
        "mpitrain job: no restart: the run was refused (exit code 2)" in console
        and not training.run_dir.exists()
    )


@pytest.mark.skipif(not MPICH, reason="Open MPI's wheel knows PMIx only, Debian's Slurm has none")
def test_what_a_run_under_srun_prints_is_typed_again(cluster, tmp_path):
    run = " ".join([MPITRAIN, "run", *tiny("run", write_text(tmp_path / "text.txt"), run_steps=2)])
    typed = f"srun --mpi=pmi2 -n 2 {run}"
    env = {**cluster.environment, "PATH": f"{HERE}:{os.environ['PATH']}"}
    first = subprocess.run(
        ["bash", "-c", typed], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert first.returncode == 0, first.stdout + first.stderr
    (further,) = re.findall("^  train further +(.*)$", first.stdout, re.MULTILINE)
    assert further.startswith("srun --mpi=pmi2 -n 2 mpitrain run "), further
    again = subprocess.run(
        ["bash", "-c", further],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert again.returncode == 0 and "done: 4 steps" in again.stdout, again.stdout + again.stderr


COMMANDS = [
    "ckpt inspect run",
    "ckpt verify run",
    "ckpt diff run run",
    "ckpt prune run --keep 1",
    "ckpt reshard run one --shards 1",
    "doctor",
]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a run that is done, and the command that trains another one."""
    folder = tmp_path_factory.mktemp("trained")
    done = run_tiny(1, folder / "run", write_text(folder / "text.txt"), run_steps=2)
    assert done.returncode == 0, tail(done.output)
    return folder


@pytest.mark.parametrize("inside", ["a batch script", "a step of srun", "the shell of salloc"])
def test_commands_of_one_process_in_an_allocation_of_several_tasks(cluster, trained, tmp_path, inside):
    """A script that was submitted within a step has that step's variables, too."""
    run = " ".join(["run", *tiny(tmp_path / "alone", trained / "text.txt", run_steps=2)])
    lines = [
        f"{MPITRAIN} {command} > out 2>&1 && echo fine || {{ echo failed: {command}; cat out; }}"
        for command in [*COMMANDS, run]
    ]
    script = tmp_path / "job.sh"
    script.write_text(
        "\n".join(["#!/bin/bash", f"cd {trained}", "rm -rf one", "env | grep ^SLURM_ | sort", *lines]) + "\n"
    )
    script.chmod(0o755)
    out = tmp_path / "console"
    submit = f"sbatch --wait --ntasks=2 --output={out} {script}"
    command = {
        "a batch script": submit,
        "a step of srun": f"srun --ntasks=2 --mpi=none bash -c 'test $SLURM_PROCID = 1 || {submit}'",
        "the shell of salloc": f"echo 'exec {script} > {out}' | script --quiet --command 'salloc --ntasks=2' "
        "/dev/null",
    }[inside]
    env = {**cluster.environment, "SHELL": "/bin/bash"}
    done = subprocess.run(
        ["bash", "-c", command], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    console = out.read_text() if out.exists() else f"{done.stdout}{done.stderr}\n{cluster.logs()}"
    assert console.count("fine") == len(lines) and "failed" not in console, console
    assert "SLURM_PROCID=0" in console and "SLURM_NTASKS=2" in console, console
