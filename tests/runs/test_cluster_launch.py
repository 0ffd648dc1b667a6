"""What started this process.

Variables alone don't say: shells, batch scripts, notebooks and children of ranks inherit them.
"""

import os
import socket
import sys

import pytest
from conftest import LONG, but_for
from launch import MPITRAIN, mpirun, options, run_tiny, tail, tiny, write_text

from mpitrain.comm.base.launchers import Process, command_of_ranks, inherited, launch, torchrun, without_rank
from mpitrain.comm.base.library import contradiction

LEFT = {"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}
MPICH = "hydra_pmi_proxy"
OPEN_MPI = "prterun"
SRUN = "slurmstepd: [4711.0]"
BATCH = "slurmstepd: [4711.batch]"
SALLOC = "slurmstepd: [4711.interactive]"
# What sbatch 22.05 sets in its script of 8 tasks, and srun in a task of a step of 2.
SCRIPT = (
    "SLURM_JOB_ID=4711 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_NTASKS=8 SLURM_NPROCS=8 "
    "SLURM_NNODES=2"
)
STEP = "SLURM_JOB_ID=4711 SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=2"


def above(*names: str):
    """Return what tells of processes above this one, the nearest first, by name or by what they
    show as their command.
    """

    def processes():
        for name in (*names, "systemd"):
            yield Process(1 << 22, name.partition(":")[0], name)

    return processes


@pytest.fixture
def pmi():
    """Return the variables of a PMI launcher that lives: PMI_FD is a connected socket."""
    here, there = socket.socketpair()
    with here, there:
        yield f"PMI_FD={here.fileno()}"


def variables(text: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in text.split())


@pytest.mark.parametrize(
    ("left", "names", "expected"),
    [
        ("", [], None),
        (SCRIPT, [], None),
        (SCRIPT, ["bash", BATCH], None),
        # sbatch was called in a step of another job
        (SCRIPT + " SLURM_STEP_ID=7 SLURM_STEP_NUM_TASKS=4", ["bash", BATCH], None),
        (STEP, [], (1, 2)),  # srun in a container that shows no process of outside
        (STEP, [SRUN], (1, 2)),
        (STEP, ["bash", SRUN, "slurmd"], (1, 2)),
        # the shell of salloc
        ("SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1", ["bash"], None),
        (
            "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=4294967290 SLURM_STEP_NUM_TASKS=1",
            ["bash", SALLOC],
            None,
        ),
        # srun -n 1 jupyter
        (
            "SLURM_PROCID=0 SLURM_NTASKS=8 SLURM_STEP_ID=0 SLURM_STEP_NUM_TASKS=1",
            ["jupyter-lab", SRUN],
            (0, 1),
        ),
        (STEP, ["bash", "sshd"], None),  # SendEnv SLURM_*
        (STEP, ["bash", "sshd-session"], None),
        ("PMI_RANK=1 PMI_SIZE=2 {pmi}", [MPICH], (1, 2)),
        ("PMI_RANK=1 PMI_SIZE=2 {pmi}", [], (1, 2)),
        # mpirun in a batch script
        ("PMI_RANK=1 PMI_SIZE=2 {pmi} " + SCRIPT, [MPICH, "slurmstepd: [4711.3]"], (1, 2)),
        ("PMI_RANK=1 PMI_SIZE=2 {pmi} " + STEP, [SRUN], (1, 2)),  # srun --mpi=pmi2
        # a child: Python closes what it isn't told to keep
        ("PMI_RANK=1 PMI_SIZE=2 PMI_FD=987", [MPICH], None),
        ("PMI_RANK=1 PMI_SIZE=2", [], None),
        ("PMI_RANK=1 PMI_SIZE=2 PMI_CONTROL_PORT=20000", [], (1, 2)),  # PALS
        ("PMI_RANK=1 PMI_SIZE=2 PMI_FD=x", [], None),
        (
            "PMI_RANK=0 PMI_SIZE=1 {pmi} OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2",
            [OPEN_MPI, "bash", MPICH],
            (1, 2),
        ),
        (
            "PMI_RANK=1 PMI_SIZE=2 {pmi} OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=1",
            [MPICH, "bash", OPEN_MPI],
            (1, 2),
        ),
        ("PMIX_RANK=1 PMIX_NAMESPACE=slurm.pmix.4711.0 " + STEP, [SRUN], (1, 2)),  # srun --mpi=pmix
        ("PMIX_RANK=1 " + STEP, ["prted", SRUN], (1, 1)),  # PRRTE without Open MPI says no size
        # mpirun has ended
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_SERVER_TMPDIR=/nonexistent", [], None),
        (
            "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_SERVER_TMPDIR=/nonexistent",
            ["apptainer", OPEN_MPI],
            (1, 2),
        ),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMIX_SERVER_TMPDIR=/tmp", [], (1, 2)),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2", ["flux-shell"], (1, 2)),
        # the script of a Flux that srun started
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=2 " + STEP, ["bash", "flux-broker-0", SRUN], None),
    ],
)
def test_a_variable_counts_for_the_process_that_it_was_set_for(pmi, left, names, expected):
    found = launch(variables(left.format(pmi=pmi)), above(*names))
    assert (found and (found.rank, found.size)) == expected


@pytest.mark.parametrize(
    ("left", "names", "nodes", "expected"),
    [
        ("", ["bash"], 1, "mpirun -n 4"),
        ("PMI_RANK=1 PMI_SIZE=4 {pmi}", [MPICH], 1, "mpirun -n 4"),
        ("PMI_RANK=1 PMI_SIZE=4 {pmi} " + SCRIPT, [MPICH, "slurmstepd: [4711.3]"], 2, "mpirun -n 4"),
        ("OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4", [OPEN_MPI, "bash", BATCH], 1, "mpirun -n 4"),
        (STEP, [SRUN], 1, "srun -n 4"),
        (STEP, [], 1, "srun -n 4"),
        (STEP, [SRUN], 2, "srun -N 2 -n 4"),
        (STEP + " SLURM_MPI_TYPE=pmix", [SRUN], 1, "srun --mpi=pmix -n 4"),
        (STEP + " PMI_RANK=1 PMI_SIZE=4 {pmi}", ["bash", SRUN], 1, "srun --mpi=pmi2 -n 4"),
        ("FLUX_TASK_RANK=1 FLUX_JOB_SIZE=4", ["flux-shell"], 2, "flux run -N 2 -n 4"),
    ],
)
def test_ranks_are_started_again_as_they_were(pmi, left, names, nodes, expected):
    assert " ".join(command_of_ranks(4, nodes, variables(left.format(pmi=pmi)), above(*names))) == expected


def test_a_rank_that_nothing_started_starts_again_alone():
    assert command_of_ranks(1, 1, {}, above("bash")) == []


def test_a_pmi_server_that_has_gone_counts_no_more():
    """The second command in a shell that mpirun started.

    The first one has finished, and the server has closed the connection.
    """
    here, there = socket.socketpair()
    said = variables(f"PMI_RANK=0 PMI_SIZE=2 PMI_FD={here.fileno()}")
    with here:
        assert launch(said, above(MPICH)) and not inherited(said, above(MPICH))
        there.close()
        assert launch(said, above(MPICH)) is None and inherited(said, above(MPICH)).size == 2


def test_a_child_of_a_rank_is_no_rank(monkeypatch):
    """The nearest process that starts ranks is above a process that has MPI loaded, such as this one."""
    monkeypatch.setattr("mpi4py.rc.initialize", False)
    import mpi4py.MPI  # noqa: F401  which loads it

    def processes():
        yield Process(os.getpid(), "python3", "python3 train.py")
        yield Process(1 << 22, OPEN_MPI, "mpirun -n 2 python3 train.py")

    said = variables("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2")
    assert launch(said, processes) is None and inherited(said, processes).size == 2


def test_a_launcher_starts_from_an_environment_without_a_rank():
    kept = variables(
        "OMPI_MCA_pml=ob1 OMPI_ALLOW_RUN_AS_ROOT=1 PMIX_MCA_gds=hash HYDRA_LAUNCHER=ssh PRTE_MCA_rmaps=x "
        + SCRIPT
    )
    said = variables(
        "PMI_RANK=0 PMI_SIZE=1 PMI_FD=7 PMIX_RANK=0 OMPI_COMM_WORLD_RANK=0 MPI_LOCALRANKID=0 "
        "HYDI_CONTROL_FD=8"
    )
    assert without_rank({**kept, **said}) == kept


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["torchrun"], (1, 2)),
        (["python -m torch.distributed.run", SRUN], (1, 2)),  # srun -n 1 torchrun
        ([], (1, 2)),
        ([MPICH, "bash", "torchrun"], None),  # mpirun in what torchrun started
    ],
)
def test_torchrun_is_known_by_its_variables_unless_a_launcher_is_nearer(names, expected):
    assert torchrun(variables("TORCHELASTIC_RUN_ID=none RANK=1 WORLD_SIZE=2"), above(*names)) == expected
    assert torchrun(variables("RANK=1 WORLD_SIZE=2"), above(*names)) is None


# ---------------------------------------------------------------- launcher and MPI library

OMPI = "OMPI_COMM_WORLD_SIZE"
PMI = "PMI_SIZE"
SLURM = "SLURM_STEP_NUM_TASKS"


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (2, {}),
        (2, {OMPI: 2, PMI: 1}),  # Open MPI's mpirun in a shell of srun --mpi=pmi2
        (2, {OMPI: 1, PMI: 2}),  # MPICH's mpirun in a shell of Open MPI's mpirun
        # mpirun in a batch script of one task, or below one of Slurm's per node
        (2, {OMPI: 2, SLURM: 1}),
        (2, {PMI: 2, SLURM: 2}),  # srun --mpi=pmi2
        (2, {PMI: 1, SLURM: 2}),  # srun --mpi=pmix in a shell of srun --mpi=pmi2
        (2, {OMPI: 1, PMI: 1, SLURM: 2}),
        (2, {OMPI: "?", PMI: ""}),
    ],
)
def test_ranks_that_are_connected_are_refused_for_nothing_that_another_launcher_left(size, said):
    assert contradiction(size, None, {name: str(value) for name, value in said.items()}) == ("", 0)


@pytest.mark.parametrize(("size", "said"), [(2, {OMPI: 4}), (2, {OMPI: 4, PMI: 1, SLURM: 8})])
def test_ranks_that_are_connected_need_one_that_agrees(size, said):
    assert contradiction(size, None, {name: str(value) for name, value in said.items()}) == (OMPI, said[OMPI])


@pytest.mark.parametrize(
    ("left", "names", "expected"),
    [
        ("PMI_RANK=1 PMI_SIZE=2 {pmi}", [MPICH], (PMI, 2)),  # Open MPI under MPICH's mpirun
        ("PMI_RANK=1 PMI_SIZE=2 {pmi} SLURM_NTASKS=1", [MPICH], (PMI, 2)),
        # MPICH under Open MPI's
        ("OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=1", [OPEN_MPI], (OMPI, 2)),
        (STEP, [SRUN], (SLURM, 2)),  # srun --mpi=none
        ("SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_STEP_ID=0", [], ("SLURM_NTASKS", 2)),
        # mpirun -n 1 in a batch script of 4 tasks
        ("PMI_RANK=0 PMI_SIZE=1 {pmi} SLURM_NTASKS=4", [MPICH], ("", 0)),
        (SCRIPT, [BATCH], ("", 0)),
    ],
)
def test_singletons_are_refused_whatever_another_launcher_left(pmi, left, names, expected):
    assert contradiction(1, launch(variables(left.format(pmi=pmi)), above(*names))) == expected


# ---------------------------------------------------------------- for real


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a folder with a text and a run that is done."""
    folder = tmp_path_factory.mktemp("launch")
    done = run_tiny(1, folder / "run", write_text(folder / "text.txt"), run_steps=2)
    assert done.returncode == 0, tail(done.output)
    return folder


ALONE = {
    "inspect": ["ckpt", "inspect", "run"],
    "verify": ["ckpt", "verify", "run"],
    "diff": ["ckpt", "diff", "run", "run"],
    "prune": ["ckpt", "prune", "run", "--keep", "1"],
    "reshard": ["ckpt", "reshard", "run", "one", "--shards", "1"],
    "doctor": ["doctor"],
    "layout": [
        "verify",
        "--layout",
        "dp=1",
        *options({"model.layers": 2, "model.width": 32, "model.heads": 2, "model.kv_heads": 1}),
    ],
}


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    "command", but_for([*ALONE], longer=[name for name in ALONE if name not in ("inspect", "layout")])
)
def test_a_command_in_a_batch_script_of_slurm_is_of_one_process(trained, command):
    done = mpirun(0, MPITRAIN, *ALONE[command], env=variables(SCRIPT), cwd=trained)
    assert done.returncode == 0, tail(done.output)


def test_a_run_in_a_batch_script_of_slurm_has_one_rank(trained):
    command = ["run", *tiny(trained / "batch", trained / "text.txt", run_steps=2)]
    done = mpirun(0, MPITRAIN, *command, env=variables(SCRIPT))
    assert done.returncode == 0 and "ranks: 1," in done.output, tail(done.output)


@LONG
def test_a_shell_that_mpirun_started_runs_commands_one_after_the_other(trained):
    """The first may be the rank; of the second the launcher knows nothing."""
    commands = "; ".join(
        f"{MPITRAIN} {' '.join(ALONE[name])} || echo failed {name}"
        for name in ("doctor", "inspect", "doctor", "verify")
    )
    done = mpirun(1, "bash", "-c", commands, cwd=trained, forked=False)
    assert done.returncode == 0, tail(done.output)
    assert "failed" not in done.output, tail(done.output)
    assert done.output.count("ranks         1 on") == 2, tail(done.output)


CHILD = """
import os, subprocess, sys
from mpi4py import MPI
for command in (sys.argv[1:], ["bash", "-c", '"$0" "$@"; exit $?', *sys.argv[1:]]):
    done = subprocess.run(command, capture_output=True, text=True, close_fds=command[0] != "bash")
    print(f"code {done.returncode}", done.stdout[-300:], done.stderr[-600:], flush=True)
MPI.COMM_WORLD.Barrier()
"""


@pytest.mark.parametrize("command", ["inspect", pytest.param("doctor", marks=LONG)])
def test_a_command_that_a_rank_starts_is_of_one_process(trained, command):
    done = mpirun(2, sys.executable, "-c", CHILD, MPITRAIN, *ALONE[command], cwd=trained, forked=False)
    assert done.returncode == 0 and done.output.count("code 0") == 4, tail(done.output)


def test_a_run_that_a_rank_starts_is_refused(trained):
    """It would be one of several that train the same alone."""
    done = mpirun(2, sys.executable, "-c", CHILD, MPITRAIN, "run", cwd=trained, forked=False)
    assert done.returncode == 0 and done.output.count("code 2") == 4, tail(done.output)
    assert "is none of them" in done.output, tail(done.output)
    assert "for one rank type: env -u " in done.output, tail(done.output)


@LONG
def test_copies_of_torchrun_are_refused_by_name(trained):
    command = [MPITRAIN, "run", *tiny(trained / "copies", trained / "text.txt")]
    port = socket.create_server(("127.0.0.1", 0))
    rendezvous = ["--nproc_per_node=2", f"--master_port={port.getsockname()[1]}", "--master_addr=127.0.0.1"]
    port.close()
    done = mpirun(
        0, sys.executable, "-m", "torch.distributed.run", "--no-python", *rendezvous, *command, forked=False
    )
    assert (
        done.returncode == 1
        and done.output.count("MeshError: torchrun started 2 copies (TORCHELASTIC_RUN_ID)") == 1
    ), tail(done.output)
    assert "mpirun -n 2 mpitrain run" in done.output and not (trained / "copies").exists()


def test_singletons_of_srun_are_refused(trained):
    """What srun --mpi=none sets. tests/hardware/test_slurm.py does it under a Slurm."""
    done = mpirun(
        0,
        MPITRAIN,
        "run",
        *tiny(trained / "none", trained / "text.txt"),
        env={**variables(STEP), "SLURM_PROCID": "0"},
    )
    assert done.returncode == 2, tail(done.output)
    assert "MeshError: srun started 2 ranks (SLURM_STEP_NUM_TASKS), but" in done.output, tail(done.output)
    assert not (trained / "none").exists()


@LONG
def test_two_ranks_start_in_the_shell_of_another_launcher():
    """This MPI's launcher sets its own variables, and lets the others be."""
    done = mpirun(2, MPITRAIN, "run", "--dry-run", *options({"parallel.dp": 2}), env=LEFT)
    assert done.returncode == 0, tail(done.output)
