"""Which of several launchers started this process, where variables of another one are left: in the shell of a Slurm step, or of mpirun."""

import pytest
from launch import MPITRAIN, mpirun, options, tail

from mpitrain.cluster.launch import rank_of_launcher
from mpitrain.comm.library import contradiction

OMPI, PMI, SLURM = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"
LEFT = {"PMI_RANK": "0", "PMI_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}


@pytest.mark.parametrize(
    ("size", "said"),
    [
        (1, {}),
        (1, {OMPI: 1}),
        (1, {OMPI: 1, PMI: 4}),  # Open MPI's mpirun in a shell of srun -n 4 --mpi=pmi2
        (1, {PMI: 1, SLURM: 4}),  # MPICH's mpirun in a batch script of 4 tasks
        (1, {OMPI: 1, PMI: 4, SLURM: 4}),
        (2, {OMPI: 2, PMI: 1}),  # Open MPI's mpirun in a shell of srun --mpi=pmi2
        (2, {OMPI: 1, PMI: 2}),  # MPICH's mpirun in a shell of Open MPI's mpirun
        (2, {OMPI: 2, SLURM: 1}),  # mpirun in a batch script of one task, or below one of Slurm's per node
        (2, {PMI: 2, SLURM: 1}),
        (2, {PMI: 2, SLURM: 2}),  # srun --mpi=pmi2
        (2, {SLURM: 2}),  # srun --mpi=pmix
        (2, {PMI: 1, SLURM: 2}),  # srun --mpi=pmix in a shell of srun --mpi=pmi2
        (2, {OMPI: 1, PMI: 1, SLURM: 2}),
        (2, {OMPI: "?", PMI: ""}),
    ],
)
def test_ranks_that_are_connected_are_refused_for_nothing_that_another_launcher_left(size, said):
    assert contradiction(size, {name: str(value) for name, value in said.items()}) == ("", 0)


@pytest.mark.parametrize(
    ("size", "said", "expected"),
    [
        (1, {OMPI: 2}, OMPI),  # MPICH under Open MPI's mpirun
        (1, {PMI: 2}, PMI),  # Open MPI under MPICH's mpirun, or under srun --mpi=pmi2
        (1, {SLURM: 2}, SLURM),  # srun --mpi=none
        (1, {PMI: 2, SLURM: 2}, PMI),
        (1, {OMPI: 2, PMI: 1}, OMPI),  # MPICH under Open MPI's mpirun, in a shell of srun --mpi=pmi2
        (1, {PMI: 2, SLURM: 1}, PMI),  # Open MPI under MPICH's mpirun, in a batch script of one task
        (1, {OMPI: 2, PMI: 1, SLURM: 1}, OMPI),
        (2, {OMPI: 4}, OMPI),
        (2, {OMPI: 4, PMI: 1, SLURM: 8}, OMPI),
    ],
)
def test_singletons_are_refused_whatever_another_launcher_left(size, said, expected):
    assert contradiction(size, {name: str(value) for name, value in said.items()}) == (expected, said[expected])


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("", (0, 1)),
        ("PMI_RANK=1 PMI_SIZE=2", (1, 2)),
        ("OMPI_COMM_WORLD_RANK=1 PMIX_RANK=1 OMPI_COMM_WORLD_SIZE=2 PMI_RANK=0 PMI_SIZE=1", (1, 2)),  # in a shell of srun --mpi=pmi2
        ("OMPI_COMM_WORLD_RANK=3 PMIX_RANK=3 OMPI_COMM_WORLD_SIZE=4 SLURM_PROCID=1 SLURM_NTASKS=2", (3, 4)),  # of the daemon of this node
        ("PMI_RANK=1 PMI_SIZE=2 PMIX_RANK=0 SLURM_PROCID=0 SLURM_NTASKS=1", (1, 2)),  # MPICH's mpirun in a shell of srun --mpi=pmix
        ("PMI_RANK=1 PMI_SIZE=2 SLURM_PROCID=1 SLURM_NTASKS=2", (1, 2)),
        ("PMIX_RANK=1 SLURM_PROCID=1 SLURM_NTASKS=2", (1, 2)),
        ("SLURM_PROCID=1 SLURM_NTASKS=2", (1, 2)),
    ],
)
def test_the_rank_before_mpi_starts_is_of_the_launcher_that_started_it(monkeypatch, variables, expected):
    for name in (*LEFT, "PMIX_RANK", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (pair.split("=") for pair in variables.split()):
        monkeypatch.setenv(name, value)
    assert rank_of_launcher() == expected


def test_two_ranks_start_in_the_shell_of_another_launcher():
    """This MPI's launcher sets its own variables, and lets the others be."""
    done = mpirun(2, MPITRAIN, "run", "--dry-run", *options({"parallel.dp": 2}), env=LEFT)
    assert done.returncode == 0, tail(done.output)
