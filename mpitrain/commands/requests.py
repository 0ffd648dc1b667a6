"""What each command can be asked: its options, their words and their defaults.

Nothing is imported that --help doesn't need.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import click

from mpitrain.commands.declared_options import (
    COUNT,
    INTEGERS,
    MOST_RANKS,
    NAME,
    RANKS,
    Finite,
    StepOrBest,
    argument,
    config_argument,
    option,
    overrides_option,
)

# no rank is slower, and a sleep of 2**63 ns or more is refused by the system
SLOWEST_TFLOPS = 0.001
WORDS_OF_STEP = "Step; best: the least validation loss; best:METRIC; default: the newest."


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """`mpitrain run`."""

    config: str | None = config_argument()
    record: str | None = option(
        "Record one rank's state and received messages of a step, for mpitrain replay.", metavar="RANK:STEP"
    )
    time_limit: str | None = option(
        "Wall-clock limit, before which the run stops with a checkpoint: run.time_limit.", metavar="HH:MM:SS"
    )
    calibrate: str | None = option(
        "Calibrate a machine file by this run's measurements: run.machine's, or a new one.", metavar="FILE"
    )
    dry_run: bool = option(
        "Send without computing: real ranks, communicators, messages; 512 ranks fit on one host.",
        is_flag=True,
    )
    steps: int | None = option("With --dry-run: number of steps; default: 3.", type=COUNT)
    share: float | None = option(
        "With --dry-run: share of each message's bytes to send; default: 1.", type=Finite(0, 1, min_open=True)
    )
    tflops: float | None = option(
        "With --dry-run: sleep for the compute time of a rank with this rate.", type=Finite(SLOWEST_TFLOPS)
    )
    machine: str | None = option(
        "With --dry-run: sleep for the predicted compute time of this machine's ranks.", metavar="NAME|FILE"
    )
    overrides: tuple[str, ...] = overrides_option()

    @property
    def all_overrides(self) -> tuple[str, ...]:
        """Those of --set and --time-limit."""
        limit = () if self.time_limit is None else (f"run.time_limit={self.time_limit}",)
        return (*self.overrides, *limit)

    @property
    def dry(self) -> dict[str, Any]:
        """What is given of the options that --dry-run takes."""
        names = ("steps", "share", "tflops", "machine")
        return {name: value for name in names if (value := getattr(self, name)) is not None}


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """`mpitrain generate`."""

    run_dir: str = argument(type=NAME)
    prompt: str | None = option("Text to continue.", type=str)
    prompts: str | None = option(
        'One prompt per line, or .jsonl objects with a "prompt"; prints one object per prompt.',
        metavar="FILE",
    )
    tokens: int = option("Tokens to sample.", default=200, type=click.IntRange(1, 1_000_000))
    temperature: float = option("Sampling temperature; 0: greedy.", default=0.8, type=Finite(0))
    top_k: int = option(
        "Sample from this many most likely tokens; 0: all.", default=0, type=click.IntRange(0, INTEGERS)
    )
    top_p: float = option(
        "Sample from the fewest tokens that reach this total probability.",
        default=1.0, type=Finite(0, 1, min_open=True),
    )  # fmt: skip
    min_p: float = option(
        "Sample from tokens with at least this share of the top probability.",
        default=0.0, type=Finite(0, 1),
    )  # fmt: skip
    repetition_penalty: float = option(
        "Above 1: tokens that the text already has become less likely.",
        default=1.0, type=Finite(0, min_open=True),
    )  # fmt: skip
    stop: tuple[str, ...] = option("Stop before this text; repeatable.", multiple=True, metavar="TEXT")
    seed: int = option("Seed of the sampling.", default=1, type=click.IntRange(0, 2**64 - 1))
    tokenizer: str | None = option("Tokenizer of the run, if its file lies outside RUN_DIR.", metavar="FILE")
    chat: bool = option("Answer the prompt as a chat, by the tokenizer's chat template.", is_flag=True)
    system: str | None = option("With --chat: the system message.", metavar="TEXT")


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """`mpitrain eval`. step: "best" and "best:METRIC": see checkpoint/retention.py."""

    path: str = argument(metavar="RUN", type=NAME)
    step: int | str | None = option(WORDS_OF_STEP, type=StepOrBest(), metavar="STEP")
    data: tuple[str, ...] = option(
        "Text, .jsonl or .parquet: loss, perplexity, bits per byte.", multiple=True, metavar="FILE", type=NAME
    )
    tasks: tuple[str, ...] = option(
        "JSON lines of multiple choice, cloze or generation: accuracies.",
        multiple=True, metavar="FILE", type=NAME,
    )  # fmt: skip
    shots: int = option(
        "Few-shot: solved examples before each question, the first ones of its file.",
        default=0, type=click.IntRange(0, 1000),
    )  # fmt: skip
    context: int | None = option("Context length in tokens; default: the model's, 2048 at most.", type=COUNT)
    stride: int | None = option(
        "Tokens scored per window of a longer text; default: the context.", type=COUNT
    )
    text_key: str = option("Key or column of --data's text.", default="text")
    tokenizer: str | None = option(
        "Tokenizer of the run, if its file lies outside RUN.", metavar="FILE", type=NAME
    )
    out: str | None = option("Also write the result with all answers as JSON.", metavar="FILE", type=NAME)
    overrides: tuple[str, ...] = overrides_option()


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """`mpitrain plan`. machine and memory_gb go before run.machine and memory.limit_gb."""

    config: str | None = argument(metavar="[CONFIG|PRESET|backtest]", required=False, type=NAME)
    rows: str | None = argument(metavar="[ROWS.csv]", required=False, type=NAME)
    ranks: str | None = option(
        "Number of ranks; several numbers print one line each.", metavar="NUMBER[,...]"
    )
    machine: str | None = option(
        "Machine: a name of jobs/machines/, such as h100-80gb, or a file; default: run.machine, or laptop.",
        metavar="NAME|FILE",
    )
    memory_gb: float | None = option(
        "Memory limit of a rank; default: memory.limit_gb, or 90 % of the machine's.",
        "--memory", type=Finite(0, 1_000_000, min_open=True), metavar="GB",
    )  # fmt: skip
    top: int | None = option("Number of layouts to print; default: 5.", type=click.IntRange(1, 50))
    all: str | None = option(
        "Write all layouts to .csv, with the reason where one is left out; .svg, .png: time over memory.",
        metavar="FILE",
    )
    what_if: tuple[str, ...] = option(
        "Change a figure of the machine, such as links.between=2x; repeatable.",
        multiple=True, metavar="FIGURE=FACTORx",
    )  # fmt: skip
    explain: bool = option("Also print compute and communication time, axis by axis.", is_flag=True)
    tokens: str | None = option(
        "Training length, such as 15T; adds days, GPU-hours, save interval.", metavar="NUMBER"
    )
    node_hours: float | None = option(
        "With --tokens: mean hours between failures of a node; default: 6334.", type=Finite(1, 10_000_000)
    )
    save_s: float | None = option(
        "With --tokens: seconds that a save stalls training (stall_s); default: predicted.",
        type=Finite(0, 1_000_000, min_open=True), metavar="SECONDS",
    )  # fmt: skip
    price: float | None = option(
        "With --tokens: price of a GPU-hour.", type=Finite(0, 1_000_000, min_open=True)
    )
    measure: int | None = option(
        "Under mpirun: run a few steps of the first K layouts; print measured beside predicted.",
        type=click.IntRange(1, 6), metavar="K",
    )  # fmt: skip
    out: str | None = option(
        "Write the best configuration; backtest: rows as .svg or .csv, a fitted machine as .toml.",
        metavar="FILE",
    )
    timeline: str | None = option(
        "Write the best layout's timeline: .json for Perfetto, or .svg.", metavar="FILE"
    )
    json: bool = option("Print one JSON object.", is_flag=True)
    overrides: tuple[str, ...] = overrides_option()


@dataclass(frozen=True, kw_only=True)
class SweepRequest:
    """`mpitrain sweep`. machine goes before run.machine."""

    config: str | None = config_argument()
    layouts: tuple[str, ...] = option(
        "Keys of one layout, as for --set; repeat it for each layout.",
        "--layout", multiple=True, metavar="'KEY=VALUE ...'",
    )  # fmt: skip
    file: str | None = option("One layout per line.", "--layouts", metavar="FILE")
    scaling: str | None = option(
        "Sweep the number of ranks. strong: constant batch; weak: batch proportional to ranks.",
        type=click.Choice(["strong", "weak"]),
    )
    over: str | None = option(
        "With --scaling: numbers of ranks; default: powers of two up to all ranks.", metavar="N,N,..."
    )
    steps: int = option("Timed steps of each layout.", default=5, type=COUNT)
    machine: str | None = option(
        "Machine for predictions: a name of jobs/machines/, or a file; default: run.machine, or laptop.",
        metavar="NAME|FILE",
    )
    out: str | None = option("Write all rows as CSV.", metavar="FILE")
    svg: str | None = option(
        "Draw: scaling as curves, layouts that differ in two keys as a heat map.", metavar="FILE"
    )
    json: bool = option("Print one JSON object.", is_flag=True)
    overrides: tuple[str, ...] = overrides_option()


def most_starts() -> int:
    """Declare the option --most."""
    return option("Maximum number of starts.", default=100, type=COUNT)


@dataclass(frozen=True, kw_only=True)
class ScheduleRequest:
    """`mpitrain schedule`."""

    name: str = argument(metavar="NAME|FILE|auto|compare|frontier")
    stages: int | None = option("Pipeline ranks; a FILE has its own.", type=COUNT)
    microbatches: int | None = option(
        "Microbatches of a step, over both copies of the model; a FILE has its own.", type=COUNT
    )
    chunks: int | None = option("Stages per rank, where the schedule leaves a choice.", type=COUNT)
    group: int | None = option(
        "Microbatches through a chunk before the next chunk (interleaved).", type=COUNT
    )
    segments: int | None = option("Segments of a microbatch's sequence (seq1f1b).", type=COUNT)
    times: str | None = option(
        "Times of a rank's layers for a microbatch, and of a message; default: 1,1,1,0.", metavar="F,I,W,C"
    )
    memory_limit: float | None = option(
        "Memory limit of a rank; a stash: activations of one microbatch in all its layers.",
        type=Finite(0, min_open=True), metavar="STASHES",
    )  # fmt: skip
    weight_memory: float | None = option(
        "Share of a stash held between I and W; default: 1.", type=Finite(0, 1), metavar="SHARE"
    )
    recompute: float | None = option(
        "Let searches recompute activations; this share of a stash, a stage's input, stays then.",
        type=Finite(0, 1, max_open=True), metavar="SHARE",
    )  # fmt: skip
    offload: float | None = option(
        "Let searches offload activations; time to copy a rank's stash to host memory, or back.",
        type=Finite(0), metavar="TIME",
    )  # fmt: skip
    trace: str | None = option(
        "Times measured in a run (run.trace); with compare alone: the run beside its simulation.",
        metavar="RUN",
    )
    out: str | None = option("Draw the timeline: .svg, .png or .txt.", metavar="FILE")
    table: str | None = option(
        "Write the table, .txt or .csv, for FILE or pipeline.schedule.", metavar="FILE"
    )
    form: str | None = option(
        "Write --table as another project reads it; default: mpitrain's own form.",
        "--format", type=click.Choice(["papers", "torch", "torch-messages", "megatron", "sail", "dualpipe"]),
    )  # fmt: skip
    json: bool = option("Print one JSON object.", is_flag=True)


@dataclass(frozen=True, kw_only=True)
class JobRequest:
    """`mpitrain job SCHEDULER`. A text that isn't given is empty."""

    config: str | None = config_argument()
    nodes: int = option("Number of nodes.", required=True, type=RANKS)
    spare: int = option(
        "Slurm: nodes beyond --nodes, which replace lost ones within the job.",
        default=0, type=click.IntRange(0, MOST_RANKS),
    )  # fmt: skip
    time: str = option(
        "Wall-clock limit of one allocation; the job resubmits itself.", required=True, metavar="HH:MM:SS"
    )
    ranks_per_node: int = option(
        "Ranks per node: one per GPU, or one per few cores.", default=4, type=click.IntRange(1, 4096)
    )
    cores: int = option("CPU cores per rank.", default=8, type=click.IntRange(1, 4096))
    gpus: int = option("GPUs per node.", default=0, type=click.IntRange(0, 4096))
    account: str = option("Account, project or bank to charge.", default="", show_default=False)
    queue: str = option("Queue or partition.", default="", show_default=False)
    launch: str = option(
        "Command that starts the ranks, for example 'srun --mpi=pmi2'.",
        default="", show_default=False, metavar="COMMAND",
    )  # fmt: skip
    setup: tuple[str, ...] = option(
        "Shell line before the ranks start, such as 'module load mpi'.", multiple=True, metavar="LINE"
    )
    image: str = option("Kubernetes: the container's image.", default="mpitrain")
    claim: str = option("Kubernetes: the volume claim that holds this folder.", default="runs")
    mpi: str = option(
        "Kubernetes: the image's MPI.", default="MPICH", type=click.Choice(["MPICH", "OpenMPI", "Intel"])
    )
    directive: tuple[str, ...] = option(
        "Additional directive for the scheduler, such as '--qos=debug' or '-l filesystems=home'.",
        multiple=True, metavar="TEXT",
    )  # fmt: skip
    most: int = most_starts()
    out: str | None = option("Name of the script; default: from CONFIG and the scheduler.", metavar="FILE")
    force: bool = option("Overwrite a script that was edited.", is_flag=True)
    submit: bool = option("Also submit the script.", is_flag=True)
    overrides: tuple[str, ...] = overrides_option()

    @property
    def supervisor(self) -> str:
        """What stands before the launcher: it starts the ranks again on nodes that answer."""
        if not self.spare:
            return ""
        options = f"--nodes {self.nodes} --ranks-per-node {self.ranks_per_node} --most {self.most}"
        return f"mpitrain supervise {options} "

    @property
    def ranks(self) -> int:
        return self.nodes * self.ranks_per_node

    @cached_property
    def seconds(self) -> int:
        """Of one allocation. Raises ConfigError."""
        from mpitrain.cluster.allocation import seconds_of

        return int(seconds_of(self.time, "--time"))
