"""Which launcher started this process: the one place that knows launchers' variables.

Standard library only; it starts nothing. Children inherit variables (the shell of a batch script, a
notebook, a command that a rank runs), so a variable alone says nothing.

    launcher                         rank                  ranks                 counts while
    Open MPI's mpirun, jsrun         OMPI_COMM_WORLD_RANK  OMPI_COMM_WORLD_SIZE  its session folder
                                                                                 is there
    MPICH's mpirun, PALS, Flux,      PMI_RANK              PMI_SIZE              PMI_FD is a
    srun with PMI                                                                connected socket,
                                                                                 or there is another
                                                                                 way to the server
    Flux without PMI                 FLUX_TASK_RANK        FLUX_JOB_SIZE         below no
                                                                                 flux-broker
    srun                             SLURM_PROCID          SLURM_STEP_NUM_TASKS  SLURM_STEP_ID is of
                                                           or SLURM_NTASKS       a step that srun
                                                                                 made
    another one with PMIx            PMIX_RANK                                   its session folder
                                                                                 is there

sbatch sets SLURM_PROCID=0 and SLURM_NTASKS for its script, too, but no SLURM_STEP_ID, unless it was
called within another job's step. The shell of salloc is a step with a number of its own. No
variable counts in the child of a process that has MPI loaded: that is the rank. Of several that
count the launcher is the one whose process is nearest above this one, else the first of this list.

Sources: srun(1), sbatch(1), salloc(1), slurm.h; "Environment variables set for MPI applications" of
Open MPI; Hydra; flux-run(1); PALS.
"""

import os
import re
import select
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

OPEN_MPI = "Open MPI's mpirun"
# of srun (SLURM_MAX_NORMAL_STEP_ID); above: batch scripts, salloc's shell, ssh
LAST_STEP = 4_294_967_280
# other ways to it than PMI_FD
PMI_SERVERS = ("PMI_PORT", "PMI_CONTROL_PORT", "PMI_CONTROL_FD", "PALS_APID")
TORCHRUN = "TORCHELASTIC_RUN_ID"
COPIES = "WORLD_SIZE"
COPY = "RANK"

# What launchers and schedulers tell their ranks. Settings of the user's are no such thing.
OF_LAUNCHERS = re.compile("(PMI|PMI2|PMIX|PRTE|OMPI|HYDRA|HYDI|PALS|ALPS|FLUX|JSM|SLURM)_|MPI_LOCAL")
SETTINGS = re.compile("OMPI_MCA_(?!orte_|ess|pmix|initial_wdir)")
OF_RANKS = re.compile(
    "(PMI|PMI2|HYDI|JSM|ALPS)_|PMIX_(?!MCA_)|PALS_.*ID$|MPI_LOCAL|FLUX_TASK_"
    "|OMPI_(COMM_WORLD|UNIVERSE|WORLD)_|PRTE_LAUNCHED"
)


class Process(NamedTuple):
    """One above this one. command: its first words, as it shows them."""

    pid: int
    name: str
    command: str


Above = Callable[[], Iterable[Process]]


@dataclass(frozen=True)
class Launcher:
    """A kind of launcher.

    sizes: the first that is there says how many ranks.
    starters: names of the processes that start its ranks.
    counts: whether its variables are of this process, by the environment and the nearest starter
    above.
    of_mpi: whether MPI looks for it by its variables.
    """

    name: str
    rank: str
    sizes: tuple[str, ...]
    local_size: str
    starters: tuple[str, ...]
    counts: Callable[[Mapping[str, str], Process | None], bool]
    of_mpi: bool = True

    @property
    def variables(self) -> tuple[str, ...]:
        """Of a rank, by which MPI would find the launcher."""
        return (self.rank, *self.sizes, *(("PMI_FD",) if self.rank == "PMI_RANK" else ()))


class Launch(NamedTuple):
    """What a launcher says of this process. variable: that says the size; "" if none does."""

    launcher: Launcher
    rank: int
    size: int
    local_size: int | None
    variable: str

    @property
    def name(self) -> str:
        return self.launcher.name


# ---------------------------------------------------------------- does a variable count?


def _has_folder(environment: Mapping[str, str], starter: Process | None) -> bool:
    """Return whether the launcher is above this process, or its session's folder is there."""
    folder = environment.get("PMIX_SERVER_TMPDIR", "")
    if not folder or (starter is not None and starter.name in OF_PMIX):
        return True
    try:
        os.stat(folder)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except (OSError, ValueError):
        return True
    return True


def _has_server(environment: Mapping[str, str], starter: Process | None) -> bool:
    """Return whether a PMI server can be spoken to: it closes the connection of a finished rank.

    That of a child was closed.
    """
    if "PMI_FD" not in environment:
        return any(name in environment for name in PMI_SERVERS)
    number = _number(environment["PMI_FD"])
    try:
        if number is None or not stat.S_ISSOCK(os.fstat(number).st_mode):
            return False
        with socket.socket(fileno=os.dup(number)) as server:
            server.getpeername()
            poll = select.poll()
            poll.register(server, 0)
            return not poll.poll(0)  # a closed other end is reported unasked
    except (OSError, OverflowError):
        return False


def _is_step(environment: Mapping[str, str], starter: Process | None) -> bool:
    """Return whether srun made this step, and this process is of it."""
    number = _number(environment.get("SLURM_STEP_ID", ""))
    return number is not None and number <= LAST_STEP and not _starts_none(starter)


def _is_task(environment: Mapping[str, str], starter: Process | None) -> bool:
    """Return whether this process is below a shell of Flux's, and not in a batch job's script."""
    return not _starts_none(starter)


OF_PMIX = ("prterun", "prted", "prte", "orterun", "orted", "mpirun", "mpiexec")
LAUNCHERS = (
    Launcher(OPEN_MPI, "OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",), "OMPI_COMM_WORLD_LOCAL_SIZE",
             OF_PMIX, _has_folder),
    Launcher("a PMI launcher (MPICH's mpirun, srun)", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALNRANKS",
             ("hydra_pmi_proxy", "flux-shell", "slurmstepd"), _has_server),
    Launcher("flux run", "FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "", ("flux-shell",), _is_task, of_mpi=False),
    Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "",
             ("slurmstepd",), _is_step, of_mpi=False),
    Launcher("a PMIx launcher", "PMIX_RANK", (), "", OF_PMIX, _has_folder),
)  # fmt: skip
RANKS = tuple(launcher.rank for launcher in LAUNCHERS)
SIZES = tuple(name for launcher in LAUNCHERS for name in launcher.sizes)
STARTERS = {name for launcher in LAUNCHERS for name in launcher.starters}
# below these nobody is a rank of Slurm's or Flux's: it came by ssh, or is a batch job's script
NO_STARTER = re.compile("(sshd|flux-broker).*")
NO_STEP = re.compile(r"slurmstepd: \[\S+\.(batch|extern|interactive)\].*")


def _starts_none(starter: Process | None) -> bool:
    return starter is not None and bool(
        NO_STARTER.fullmatch(starter.name) or NO_STEP.fullmatch(starter.command)
    )


# ---------------------------------------------------------------- who started this process


def launch(environment: Mapping[str, str] = os.environ, above: Above | None = None) -> Launch | None:
    """Return what started this process as a rank; None if nothing did.

    above: yields the processes above this one, the nearest first.
    """
    if not any(name in environment for name in RANKS):
        return None
    processes = list((above or processes_above)())
    nearest = [
        at
        for at, process in enumerate(processes)
        if process.name in STARTERS or NO_STARTER.fullmatch(process.name)
    ]
    starter = processes[nearest[0]] if nearest else None
    if nearest and any(_has_mpi(process.pid) for process in processes[: nearest[0]]):
        return None  # that one is the rank, and this is a child of it
    launchers = [
        launcher
        for launcher in LAUNCHERS
        if launcher.rank in environment and launcher.counts(environment, starter)
    ]
    launchers.sort(key=lambda launcher: starter is None or starter.name not in launcher.starters)
    return _said(launchers[0], environment) if launchers else None


def command_of_ranks(
    size: int, num_nodes: int = 1, environment: Mapping[str, str] = os.environ, above: Above | None = None
) -> list[str]:
    """Return the words that start as many ranks as this process is one of, with its launcher."""
    found = launch(environment, above)
    if found is None:
        return [] if size == 1 else ["mpirun", "-n", str(size)]
    processes = (above or processes_above)()
    starter = next((process.name for process in processes if process.name in STARTERS), "")
    nodes = ["-N", str(num_nodes)] if num_nodes > 1 else []
    if starter == "slurmstepd" or found.name == "srun":
        kind = environment.get("SLURM_MPI_TYPE", "pmi2" if "PMI_RANK" in environment else "")
        return ["srun", *([f"--mpi={kind}"] if kind else []), *nodes, "-n", str(size)]
    if starter == "flux-shell" or found.name == "flux run":
        return ["flux", "run", *nodes, "-n", str(size)]
    return ["jsrun" if "JSM_NAMESPACE_RANK" in environment else "mpirun", "-n", str(size)]


def inherited(environment: Mapping[str, str] = os.environ, above: Above | None = None) -> Launch | None:
    """Return what MPI's launcher said of another process whose variables this one has, or None."""
    left = [
        launcher
        for launcher in LAUNCHERS
        if launcher.of_mpi and any(name in environment for name in launcher.variables)
    ]
    return _said(left[0], environment) if left and launch(environment, above) is None else None


def torchrun(
    environment: Mapping[str, str] = os.environ, above: Above | None = None
) -> tuple[int, int] | None:
    """Return this copy's number and that of all, where torchrun started this process; else None.

    A launcher that is nearer above counts, as for mpirun in a script that torchrun started.
    """
    copy, copies = (_number(environment.get(name, "")) for name in (COPY, COPIES))
    if TORCHRUN not in environment or copy is None or copies is None:
        return None
    for process in (above or processes_above)():
        if "torchrun" in process.command or "torch.distributed" in process.command:
            break
        if process.name in STARTERS:
            return None
    return copy, copies


def without_launcher(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for an MPI process that is alone: without launchers and schedulers."""
    return {
        name: value
        for name, value in environment.items()
        if SETTINGS.match(name) or not OF_LAUNCHERS.match(name)
    }


def without_rank(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment for a launcher, without what says that this process is a rank."""
    return {name: value for name, value in environment.items() if not OF_RANKS.match(name)}


def _said(launcher: Launcher, environment: Mapping[str, str]) -> Launch:
    rank = _number(environment.get(launcher.rank, ""))
    sizes = [(name, _number(environment[name])) for name in launcher.sizes if name in environment]
    variable, size = next(((name, size) for name, size in sizes if size is not None), ("", 1))
    return Launch(launcher, rank or 0, size, _number(environment.get(launcher.local_size, "")), variable)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 12 else None


# ---------------------------------------------------------------- the processes above


def processes_above() -> Iterator[Process]:
    """Yield the processes above this one, the nearest first, as far as the system tells."""
    pid = os.getppid()
    with suppress(OSError, ValueError, IndexError):
        while pid > 1:
            before, _, after = (
                Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")
            )
            command = (
                Path(f"/proc/{pid}/cmdline")
                .read_text(encoding="utf-8", errors="replace")
                .replace("\0", " ")
                .strip()
            )
            yield Process(pid, before.partition("(")[2], command)
            pid = int(after.split()[1])


def _has_mpi(pid: int) -> bool:
    """Return whether a process has an MPI library loaded."""
    try:
        return re.search(rb"/libmpi(ch)?(_abi)?\.", Path(f"/proc/{pid}/maps").read_bytes()) is not None
    except OSError:
        return False
