"""What sets schedulers apart: how times and sites are written, and commands.

A scheduler is one entry here and one template in jobs/.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from mpitrain.commands.declared_options import options_given
from mpitrain.commands.requests import JobRequest

OF_PODS = ("image", "claim", "mpi")  # options of Kubernetes alone


@dataclass(frozen=True)
class Scheduler:
    """Of one kind of cluster.

    submit: the command that takes a script, given as its last argument or, with `<`, as its input.
    launch: what starts the ranks, unless the user says.
    directives: names of options, by what they are for.
    prefix: what begins a line that the scheduler reads.
    mount: where the ranks see the working directory, if not under the path that it has here.
    console: the file that rank 0's console is in.
    spare: directives for a job that continues when it loses a node; (): it can't have spares.
    """

    title: str
    template: str
    submit: tuple[str, ...]
    launch: Callable[[JobRequest], str]
    time: Callable[[int], str]
    prefix: str
    directives: dict[str, str] = field(default_factory=dict)
    mount: str = ""
    gpus: Callable[[JobRequest], str] = lambda asked: ""
    console: str = ""
    watch: str = ""
    leave: str = ""
    spare: tuple[str, ...] = ()

    def lines(self, asked: JobRequest) -> list[str]:
        """Return the directives that only some sites need."""
        values = {**_site(asked), "gpus": str(asked.gpus) if asked.gpus else ""}
        names = [name for name, value in values.items() if value and name in self.directives]
        known = [self.directives[name] + values[name] for name in names]
        given = (*known, *(self.spare if asked.spare else ()), *(asked.directive if self.prefix else ()))
        return [self.prefix + line for line in given]

    def ignored(self, asked: JobRequest) -> list[str]:
        """Return the options that were given, and that this scheduler has nothing for."""
        ignored = [name for name, value in _site(asked).items() if value and name not in self.directives]
        of_pods = [] if self.mount else [name for name in OF_PODS if f"--{name}" in options_given(asked)]
        return [*ignored, *of_pods, *["directive"] * bool(asked.directive and not self.prefix)]


def _site(asked: JobRequest) -> dict[str, str]:
    return {"account": asked.account, "queue": asked.queue}


def _mpirun(asked: JobRequest) -> str:
    return f"mpirun -n {asked.ranks}"


def _flux(asked: JobRequest) -> str:
    gpus = f" -g {-(-asked.gpus // asked.ranks_per_node)}" if asked.gpus else ""
    return f"flux run -N {asked.nodes} -n {asked.ranks} -c {asked.cores}{gpus}"


def _clock(seconds: int) -> str:
    return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"


SCHEDULERS = {
    "slurm": Scheduler(
        "Slurm", "slurm.sh", ("sbatch",), lambda asked: "srun", _clock, "#SBATCH ",
        {"account": "--account=", "queue": "--partition=", "gpus": "--gpus-per-node="},
        console="{name}-JOB.out", watch="squeue --me", leave="scancel --signal=USR1 JOB",
        spare=("--no-kill",),
    ),
    "pbs": Scheduler(
        "PBS", "pbs.sh", ("qsub",), _mpirun, _clock, "#PBS ",
        {"account": "-A ", "queue": "-q "},
        gpus=lambda asked: f":ngpus={asked.gpus}" if asked.gpus else "",
        console="{name}.oJOB", watch="qstat -u $USER", leave="qsig -s SIGUSR1 JOB",
    ),
    "lsf": Scheduler(
        "LSF", "lsf.sh", ("bsub", "<"), _mpirun, _clock, "#BSUB ",
        {"account": "-P ", "queue": "-q ", "gpus": "-gpu num="},
        console="{name}-JOB.out", watch="bjobs", leave="bkill -s USR1 JOB",
    ),
    "flux": Scheduler(
        "Flux", "flux.sh", ("flux", "batch"), _flux, _clock, "#flux: ",
        {"account": "--bank=", "queue": "--queue=", "gpus": "--gpus-per-node="},
        console="{name}-JOB.out", watch="flux jobs", leave="flux proxy JOB flux job kill -s USR1 RUN",
    ),
    "kubernetes": Scheduler(
        "Kubernetes, with the MPI operator", "kubernetes.yaml", ("kubectl", "create", "-f"), _mpirun, _clock,
        prefix="", mount="/mpitrain",
        gpus=lambda asked: f', nvidia.com/gpu: "{asked.gpus}"' if asked.gpus else "",
        console="kubectl logs -f -l "
                "training.kubeflow.org/job-name={name},training.kubeflow.org/job-role=launcher",
        watch="kubectl get mpijobs",
        leave="kubectl exec LAUNCHER -- kill -USR1 1",
    ),
}  # fmt: skip
