"""The command line: click commands and nothing else.

Each imports what it needs when it runs: --help answers at once.
"""

import os
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING

import click

from mpitrain import __version__
from mpitrain.cluster import entry, std_streams
from mpitrain.commands.declared_options import (
    COUNT,
    INTEGERS,
    NAME,
    RANKS,
    TEXT,
    Finite,
    StepOrBest,
    config_argument,
    option_named,
    options_of,
    overrides_option,
    refuse_options,
)
from mpitrain.commands.requests import (
    WORDS_OF_STEP,
    EvaluationRequest,
    GenerateRequest,
    JobRequest,
    PlanRequest,
    RunRequest,
    ScheduleRequest,
    SweepRequest,
    most_starts,
)
from mpitrain.errors import DONE, FAILED, ConfigError, MpitrainError, library_fault, storage_fault
from mpitrain.inputs import as_argument, printable, shown
from mpitrain.plan.declared.screen import columns, folded

if TYPE_CHECKING:
    from mpitrain.cluster.guard import Guard
    from mpitrain.cluster.team import Team
    from mpitrain.training.replay.record_request import RecordRequest


class MissingCommand(click.UsageError):
    """A group was called without a command: its help on standard error, by any click; exit code 2."""

    def __init__(self, context: click.Context):
        super().__init__("a command is missing", context)

    def show(self, file: object = None) -> None:
        click.echo(self.ctx.get_help(), err=True)


class Command(click.Command):
    """Stands in its group's help with its whole first sentence, which click would cut."""

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(INTEGERS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            has_keys = any(parameter.name == "overrides" for parameter in self.params)
            if has_keys and (hint := _hint(error, typed)):
                error.message = f"{error.message.rstrip('.')}; {hint}"
            raise


def _hint(error: click.UsageError, args: list[str]) -> str:
    """Return what to type instead of another trainer's option, or of a bare key; "" if unknown."""
    from mpitrain.config import hint_for_option

    if isinstance(error, click.NoSuchOption):
        hint = hint_for_option(error.option_name.lstrip("-"))
        error.possibilities = [] if hint else error.possibilities
        return hint
    keys = [word for word in args if re.match(r"[a-z_.]+=", word) and word in error.message]
    return f"keys are changed by {' '.join(f'--set {as_argument(key)}' for key in keys)}" if keys else ""


class CommandGroup(click.Group):
    """A group of such commands."""

    command_class = Command
    group_class = type

    def get_short_help_str(self, limit: int = 0) -> str:
        return super().get_short_help_str(INTEGERS)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args and not ctx.resilient_parsing:
            raise MissingCommand(ctx)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple:
        if self.get_command(ctx, args[0]) is None:
            from mpitrain.config_hints import command_of_another_name

            if other := command_of_another_name(args[0]):
                raise click.UsageError(f"No such command '{shown(args[0])}'; use mpitrain {other}", ctx)
        return super().resolve_command(ctx, args)


CONFIG = option_named("config", config_argument())
PATH = click.argument("path", type=NAME)
NUM_RANKS = click.option("--ranks", "num_ranks", default=1, type=RANKS, help="Number of ranks of the layout.")
OVERRIDE = option_named("overrides", overrides_option())


def main() -> None:
    """Run the command line; an error is reported by the first rank, and ends all with its code."""
    entry.settle_libraries()
    std_streams.settle()
    try:
        code = cli(standalone_mode=False) or 0
    except click.exceptions.Exit as done:
        code = done.exit_code
    except click.ClickException as error:
        error.message = shown(error.message)  # what was typed, perhaps thousands of characters
        code = entry.on_first_rank(error.show, error.exit_code)
    except (MpitrainError, ImportError, OSError) as error:
        if isinstance(error, OSError):
            fault = storage_fault(error)
        else:
            fault = error if isinstance(error, MpitrainError) else library_fault(error)
        if fault is None:
            raise
        entry.report_error(fault)
        code = fault.exit_code
    except click.Abort:
        code = FAILED
    sys.stdout.flush()
    sys.exit(code)


def _say(text: str) -> None:
    """Print lines, without what a terminal would obey: names and texts may be a stranger's."""
    click.echo(folded(printable(text), columns()))


def _answer(text: str) -> int:
    """Print what a command was asked for; return 0. Raises MpitrainError if it is lost."""
    _say(text)
    std_streams.require_written(sys.stdout)
    return DONE


def guarded_command(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command its process's guard, which reports also what it can't import."""

    @wraps(command)
    def start(**asked) -> int:
        from mpitrain.cluster.guard import guarded

        return guarded(lambda guard: command(guard, **asked), entry.report_error)

    return start


def team_command(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command its team: this process, or the ranks that a launcher started."""

    @wraps(command)
    def start(**asked) -> int:
        from mpitrain.cluster.team import together

        return together(lambda team: command(team, **asked), entry.report_error)

    return start


def first_rank_command(what: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Run a command on the first rank alone, while the others wait."""

    def on_first_rank(command: Callable[..., int]) -> Callable[..., int]:
        @wraps(command)
        @team_command
        def start(team: "Team", **asked) -> int:
            return team.on_first_rank(what, partial(command, **asked))

        return start

    return on_first_rank


HELP_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True}


@click.group(cls=CommandGroup, context_settings=HELP_SETTINGS)
@click.version_option(__version__, prog_name="mpitrain")
def cli() -> None:
    """Train language models on any cluster that speaks MPI.

    \b
    mpirun -n 2 mpitrain run                   train a small model
    mpirun -n 8 mpitrain run my.toml           train a configuration, or resume
    mpitrain generate runs/my --prompt "..."   sample text from it
    """


@cli.command(short_help="Train a model, from the newest checkpoint if there is one.")
@options_of(RunRequest)
def run(request: RunRequest) -> int:
    """Train a model; the same command resumes from the newest checkpoint.

    Without CONFIG: a small model on the quickstart corpus.

    Exit codes: 0 done, 1 failed, 2 bad input, 75 stopped early with a checkpoint (run it again to resume).
    """
    from mpitrain.training.replay.record_request import RecordRequest

    record = RecordRequest.read(request.record)
    chosen = request.dry
    if {"tflops", "machine"} <= chosen.keys():
        raise ConfigError("--tflops and --machine both say how long ranks compute; leave one of them out")
    if request.dry_run:
        why = "does nothing with --dry-run, which computes and measures nothing; leave it out"
        refuse_options(request, ("--calibrate", "--record"), why)
        return _dry_run(request=request)
    if chosen:
        name = next(iter(chosen))
        key = {"steps": "run.steps", "machine": "run.machine"}.get(name)
        instead = f"use --set {key}={shown(chosen[name])}" if key else f"leave --{name} out"
        raise ConfigError(f"--{name} does nothing without --dry-run; add --dry-run, or {instead}")
    if request.calibrate is not None:
        from mpitrain.planner.calibration_file import require_name

        require_name(request.calibrate)  # before a corpus is tokenized
    return _train(request=request, record=record)


@guarded_command
def _train(guard: "Guard", request: RunRequest, record: "RecordRequest") -> int:
    with entry.loading():
        from mpitrain.training.repairs import run as train

    return train(request.config, request.all_overrides, guard, record, request.calibrate)


@guarded_command
def _dry_run(guard: "Guard", request: RunRequest) -> int:
    from mpitrain.dryrun.dry_run import DryRunOptions
    from mpitrain.dryrun.dry_run import run as walk

    return walk(request.config, request.all_overrides, DryRunOptions(**request.dry), guard, _answer)


@cli.command(short_help="Repeat one rank's recorded step and compare the bits.")
@click.argument("file", type=click.Path())
@click.option(
    "--stop-at", type=TEXT, metavar="INSTRUCTION",
    help="Call Python's debugger before an instruction, for example B2@1.",
)  # fmt: skip
def replay(file: str, stop_at: str | None) -> int:
    """Repeat the recorded step of one rank, alone, and compare its results with the recording,
    bit for bit.

    Exit codes: 0 equal, 1 different, 2 bad input. mpitrain run --record writes FILE.
    """
    from mpitrain.training.replay.replay import main

    return main(file, stop_at, _answer)


@cli.command(short_help="Print the instructions of a training step.")
@CONFIG
@NUM_RANKS
@click.option(
    "--rank", type=click.IntRange(0), help="Rank whose program is printed; default: all pipeline ranks."
)
@click.option("--traffic", is_flag=True, help="With --rank: also print each message's axis and bytes.")
@OVERRIDE
def program(**asked) -> None:
    """Print the instructions of a training step, without running anything."""
    from mpitrain.commands.inspect import show_program

    _answer(show_program(**asked))


@cli.command(short_help="Prove a layout complete, in order and free of deadlock; draw it.")
@CONFIG
@NUM_RANKS
@OVERRIDE
def check(**asked) -> None:
    """Prove a layout: complete, in order, every message matched, no deadlock. Draws the schedule."""
    from mpitrain.commands.inspect import show_proof

    _answer(show_proof(**asked))


@cli.command(short_help="Predict the memory of each pipeline rank.")
@CONFIG
@NUM_RANKS
@OVERRIDE
def memory(**asked) -> None:
    """Predict the memory of each pipeline rank.

    Weights, gradients, moments, communication buffers, activations, host memory.
    """
    from mpitrain.commands.inspect import show_memory

    _answer(show_memory(**asked))


@cli.command(short_help="Check a layout against one rank, with a small model in fp64.")
@CONFIG
@click.option(
    "--layout", required=True, metavar="AXIS=N,...", help="Degrees of the axes, for example tp=2,pp=2."
)
@OVERRIDE
def verify(config: str | None, layout: str, overrides: tuple[str, ...]) -> int:
    """Check that a layout computes what one rank computes, with a small version of the model in fp64.

    Starts mpirun itself, unless it already runs under mpirun.

    Exit codes: 0 equal, 1 different, 2 bad input.
    """
    from mpitrain.cluster.launch import is_single, start
    from mpitrain.commands.inspect import degrees

    overrides, num_ranks = degrees(layout, overrides)
    if num_ranks > 1 and is_single():
        return start(
            num_ranks,
            ["verify", *([config] if config else []), "--layout", layout, *(f"--set={o}" for o in overrides)],
        )
    return _compare_layouts(config=config, overrides=overrides)


@guarded_command
def _compare_layouts(guard: "Guard", config: str | None, overrides: tuple[str, ...]) -> int:
    from mpitrain.commands.verify import main

    return main(config, overrides, guard, _say)


@cli.command("import", short_help="Create a run from the weights of a Hugging Face folder.")
@PATH
@click.option(
    "--to", "target", required=True, type=NAME,
    help="New run directory, or a step, RUN/checkpoints/step-00000000.",
)  # fmt: skip
@OVERRIDE
@team_command
def import_weights(team: "Team", **asked) -> int:
    """Create a run directory with the weights, sizes and tokenizer of a Hugging Face folder.

    Under mpirun all ranks share the work. To train without a copy on disk, run with model.init = PATH.

    Exit codes: 0 done, 2 the folder can't be imported; nothing is written then.
    """
    from mpitrain.commands.weights import import_folder

    return import_folder(team, say=_answer, **asked)


@cli.command(short_help="Export a step as a Hugging Face folder, and verify it.")
@click.argument("path", metavar="RUN", type=NAME)
@click.option("--to", "target", required=True, type=NAME, help="New folder.")
@click.option("--step", type=StepOrBest(), metavar="STEP", help=WORDS_OF_STEP)
@click.option(
    "--dtype", type=click.Choice(("fp64", "fp32", "fp16", "bf16")),
    help="Tensor type; default: the run's compute type.",
)  # fmt: skip
@click.option("--shard-size", default="5GB", metavar="SIZE", help="Maximum size of a file.")
@click.option(
    "--prove/--no-prove", default=None,
    help="Compare logits with transformers; default: for small models, where it is installed.",
)  # fmt: skip
@team_command
def export(team: "Team", path: str, target: str, **asked) -> int:
    """Export a step as a Hugging Face folder, read it back, and compare every weight.

    Under mpirun all ranks share the work.

    Exit codes: 0 done and verified, 1 the folder differs from the step, 2 bad input.
    """
    from mpitrain.commands.weights import ExportOptions, export_step

    return export_step(team, path, target, ExportOptions(**asked), _answer)


@cli.group(short_help="Write, explain and submit a job script.")
def job() -> None:
    """Write a job script for a cluster's scheduler, explain it, submit it.

    The job resubmits itself until the run is done.
    """


RUNS = click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path())
OVER = click.option(
    "--over", default="step", type=click.Choice(("step", "tokens", "hours")),
    help="Horizontal axis of the curves.",
)  # fmt: skip
MOST_STARTS = option_named("most", most_starts())


def _for_scheduler(kind: str, title: str) -> None:
    @job.command(kind, help=f"A job for {title}. Trains CONFIG on --nodes times --ranks-per-node ranks.")
    @options_of(JobRequest)
    def write(request: JobRequest) -> int:
        from mpitrain.commands.job.render import main

        return main(kind, request, _say)


SCHEDULERS = {"slurm": "Slurm", "pbs": "PBS", "lsf": "LSF", "flux": "Flux"}
SCHEDULERS["kubernetes"] = "Kubernetes' MPI operator"
for _kind, _title in SCHEDULERS.items():
    _for_scheduler(_kind, _title)


@job.command(short_help="Decide whether a job restarts its run after an exit code.")
@click.argument("code", type=click.IntRange(0, 255))
@CONFIG
@OVERRIDE
@MOST_STARTS
def again(code: int, config: str | None, overrides: tuple[str, ...], most: int) -> int:
    """Decide whether a job restarts a run that ended with exit code CODE. For job scripts.

    Exit codes: 0 yes, 1 no, 3 no, although the run with CODE 0 isn't done. No after 0 with a
    checkpoint of step run.steps, after 2, after --most starts, and after 3 starts in a row without
    a newer checkpoint.
    """
    from mpitrain.commands.job.again import main

    verdict, why = main(code, config, overrides, most)
    _say(f"mpitrain job: {why}")
    return verdict


@cli.command(
    short_help="Restart a run at once when a rank dies.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@MOST_STARTS
@click.option(
    "--nodes", type=RANKS, help="In a Slurm job with more nodes: start srun on this many that answer."
)
@click.option("--ranks-per-node", default=1, type=RANKS, help="With --nodes: ranks on each node.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def supervise(command: tuple[str, ...], most: int, nodes: int | None, ranks_per_node: int) -> int:
    """Run COMMAND, such as mpirun -n 4 mpitrain run, and restart it until the run is done.

    With --set recovery.every=1 the run resumes after its last step, from copies in the node's memory.
    It is not restarted after a signal, after exit codes 2 and 75, after --most starts, and after
    3 starts in a row without a newer step.

    Exit code: that of the last start.
    """
    from mpitrain.commands.job.supervise import main, spare_nodes

    if nodes is None and ranks_per_node > 1:
        raise ConfigError("--ranks-per-node does nothing without --nodes; add --nodes, or leave it out")
    config, overrides = _run_options(command)
    spares = None if nodes is None else spare_nodes(nodes, ranks_per_node, config, overrides)
    return main(command, config, overrides, most, _say, spares)


def _run_options(command: tuple[str, ...]) -> tuple[str | None, tuple[str, ...]]:
    """Return the configuration and the overrides of `mpitrain run` in a command."""
    words = enumerate(zip(map(os.path.basename, command), command[1:]), start=2)
    begin = next((begin for begin, pair in words if pair == ("mpitrain", "run")), None)
    if begin is None:
        raise ConfigError(
            f"COMMAND = {shown(shlex.join(command))}: needed one with mpitrain run, such as "
            "mpirun -n 2 mpitrain run my.toml"
        )
    given = run.make_context("run", list(command[begin:])).params
    return given["config"], given["overrides"]


@cli.command()
@options_of(GenerateRequest)
def generate(request: GenerateRequest) -> None:
    """Sample text from the newest checkpoint of RUN_DIR, on one rank.

    RUN_DIR need not be trusted: no file outside it is read.
    """
    if request.system is not None and not request.chat:
        raise ConfigError("--system without --chat: it is for a chat template; add --chat")
    if (request.prompt is None) == (request.prompts is None):
        given = "neither" if request.prompt is None else "both"
        raise ConfigError(f"found {given} of --prompt and --prompts; give one of them")
    from mpitrain.commands.generate import pieces

    # what a model says, the terminal's encoding may not have
    sys.stdout.reconfigure(errors="replace")
    for piece in pieces(request):
        click.echo(piece, nl=False)


@cli.command(short_help="Write a page that shows a run, or compares several.")
@RUNS
@click.option("--out", default="report.html", metavar="FILE", type=NAME, help="The page.")
@OVER
def report(runs: tuple[str, ...], out: str, over: str) -> int:
    """Write one HTML file that shows a run, or compares several. It needs no network.

    RUN is only read. It need not be trusted, and may be running.
    """
    from mpitrain.commands.report_page import main

    return main(runs, out, over, _answer)


@cli.command(short_help="Draw curves of one run or several for a paper.")
@RUNS
@click.option("--out", required=True, metavar="FILE", type=NAME, help="The picture: .svg or .png.")
@click.option(
    "--curve", "curves", multiple=True, default=("loss",), metavar="NAME",
    help="A number of metrics.jsonl, such as loss, val_loss or grad_norm; a panel each.",
)  # fmt: skip
@OVER
def plot(runs: tuple[str, ...], out: str, curves: tuple[str, ...], over: str) -> int:
    """Draw curves of one run or several, a panel each, in the width of a paper's column."""
    from mpitrain.commands.report_page import plot

    return plot(runs, out, curves, over, _answer)


@cli.command(short_help="Watch runs under way on a page, or in the terminal.")
@RUNS
@click.option("--terminal", is_flag=True, help="Draw here, instead of a page for a browser.")
@click.option(
    "--host", default="127.0.0.1", metavar="ADDRESS", type=NAME, help="Address to serve the page on."
)
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port of the page; 0: any free port.")
@OVER
def watch(runs: tuple[str, ...], terminal: bool, host: str, port: int, over: str) -> int:
    """Watch runs under way, by their run directories alone. Nothing is written.

    The page is that of `mpitrain report`, updated every two seconds. Its address has a secret; by default
    only this host is answered.
    """
    from mpitrain.commands import watch

    if terminal and (host, port) != ("127.0.0.1", 0):
        raise ConfigError(
            "--host and --port do nothing with --terminal, which serves no page; leave them out"
        )
    return watch.show(runs, over) if terminal else watch.serve(runs, over, host, port, _answer)


@cli.command("eval", short_help="Evaluate a step on texts and tasks, in any layout.")
@options_of(EvaluationRequest)
@guarded_command
def evaluate(guard: "Guard", request: EvaluationRequest) -> int:
    """Evaluate a step on texts and tasks: loss, perplexity, accuracies.

    Under mpirun in the run's layout, or in another by --set, such as --set parallel.tp=2. The
    result is added to RUN/evaluations.jsonl. RUN need not be trusted: no file outside it is read.
    """
    with entry.loading():
        from mpitrain.commands.evaluation.printed import main

    return main(request, guard, _say)


@cli.command()
@options_of(ScheduleRequest)
def schedule(request: ScheduleRequest) -> int:
    """Prove a pipeline schedule, simulate it with given times, draw it. Nothing is trained.

    NAME is a schedule, for example zbv; FILE is a table of your own, as text or CSV. Prints the
    makespan of a step, its lower bound, the bubble, and the peak of microbatches in flight on a rank.
    `auto` is the shortest schedule that fits. `compare` prints all schedules at one size, or a run's measured
    timeline under its simulation; `frontier` their time against memory.

    \b
    A table, text or CSV, has a line for each rank; F3@1: microbatch 3 on stage 1
        rank 0: F0@0 F1@0 B0@0 B1@0            F forward, B whole backward,
        rank 1: F0@1 B0@1 F1@1 I1@1 W1@1       I for inputs, W for weights,
                                               R recomputation, before B or I,
                                               O offloading, before F
    Train it with pipeline.schedule=FILE. Orders of PyTorch, Megatron, sail-sg
    and DualPipe are read, too.
    """
    from mpitrain.commands.schedule.command import answer

    return _answer(answer(request))


@cli.command("config", short_help="Explain the keys of the configuration.")
@click.argument("key", required=False, type=NAME)
@click.option(
    "--of", "run", metavar="RUN", type=NAME, help="Values of a run directory or a file, and their origins."
)
def explain_config(key: str | None, run: str | None) -> None:
    """Explain KEY: type, default, meaning, families that have it, and messages that refuse it.

    KEY is a key such as parallel.zero, or a table such as parallel. Without it: all keys, a line each.
    """
    from mpitrain.commands.reference import show

    _answer(show.explain(key) if run is None else show.origins_of(run, key))


@cli.command("plan", short_help="Find the best layout by predicted time and memory.")
@options_of(PlanRequest)
def make_plan(request: PlanRequest) -> int:
    """Find the best layout for a model, a number of ranks and a machine, by predicted time and memory.

    Keys that CONFIG or --set gives are kept. Degrees, schedule, ZeRO, microbatch, recomputation and
    the kind of context parallelism are searched, and optimizer offload where nothing fits without
    it. Nothing is run without --measure.

    mpitrain plan backtest ROWS.csv predicts published step times and prints the errors.
    """
    from mpitrain.commands.plan.plan_command import answer, require_measurable

    if not request.measure:
        return _answer(answer(request))
    return _measure_layouts(request=require_measurable(request))


@guarded_command
def _measure_layouts(guard: "Guard", request: PlanRequest) -> int:
    from mpitrain.commands.plan.measured_steps import measure  # torch

    return measure(request, guard, _say)


@cli.command(short_help="Measure several layouts in turn, on the same ranks.")
@options_of(SweepRequest)
@guarded_command
def sweep(guard: "Guard", request: SweepRequest) -> int:
    """Run a few steps of each layout; print step time, tokens/s and memory beside predictions.

    Under mpirun on all its ranks: mpirun -n 4 mpitrain sweep --layout parallel.pp=2 --layout parallel.pp=4

    Steps use random tokens; the first is not timed. Nothing is read or saved. A layout that can't
    run is reported with the reason. --scaling runs the first 1, 2, 4, ... ranks, while the others
    wait, and also prints efficiency and communication time.
    """
    from mpitrain.commands.plan.layout_sweep import sweep as sweep_layouts  # torch
    from mpitrain.commands.plan.scaling_sweep import sweep_ranks

    return (sweep_layouts if request.scaling is None else sweep_ranks)(request, guard, _say)


@cli.command(short_help="Report on MPI, launcher, ranks, nodes, GPUs and bandwidth.")
@guarded_command
def doctor(guard: "Guard") -> int:
    """Report on MPI, launcher, ranks, nodes, CUDA-awareness and bandwidth. Under mpirun, all ranks report."""
    from mpitrain.commands.doctor import main

    return main(guard, _say)


@cli.group()
def bench() -> None:
    """Measure a machine for `mpitrain plan`.

    Under mpirun all ranks measure at the same time, as they would work in a run.
    """


@bench.command("machine", short_help="Measure a machine, and write its file.")
@click.option("--out", metavar="FILE", required=True, help="Machine file to write, .toml.")
@click.option(
    "--like", type=TEXT, metavar="NAME|FILE", help="Machine whose figures replace what can't be measured."
)
@click.option(
    "--storage", type=TEXT, metavar="FOLDER", help="Also measure write bandwidth to this checkpoint folder."
)
@OVERRIDE
@guarded_command
def bench_machine(guard: "Guard", **asked) -> int:
    """Measure the machine of these ranks, and write its file for mpitrain plan --machine.

    Measures matrix products, attention, memory bandwidth and kernel launches; under mpirun on all ranks
    at the same time, and also their links. --set takes run.device, run.threads and comm.device.
    """
    from mpitrain.commands.bench import bench as measure

    return measure(guard=guard, say=_say, **asked)


@cli.group()
def data() -> None:
    """Prepare and inspect training data.

    CONFIG is that of `mpitrain run`: its table [data] has the text and the tokenizer.
    """


@data.command("show", short_help="Print the documents that a step has read.")
@click.argument("run_dir", metavar="RUN", type=NAME)
@click.option("--step", required=True, type=COUNT, help="Step of the run.")
@click.option("--rank", type=click.IntRange(0), help="Only this rank; default: all ranks.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with all tokens.")
@first_rank_command("reading the tokens of a step")
def show_data(**asked) -> int:
    """Print what a step has read: source, document, offset and text, from the run directory alone.

    Exit codes: 0 done, 2 there is no such step.
    """
    from mpitrain.commands.data.provenance import show

    return _answer(show(**asked))


@data.command("prepare", short_help="Tokenize the text of a configuration, on all ranks.")
@CONFIG
@OVERRIDE
@guarded_command
def prepare_data(guard: "Guard", config: str | None, overrides: tuple[str, ...]) -> int:
    """Tokenize the text of a configuration into data.tokens, or into its run directory.

    The same command resumes after a kill, on any number of ranks, with the same bytes.

    Exit codes: 0 done, 2 bad input, 75 stopped early (run it again).
    """
    with entry.loading():
        from mpitrain.training.token_preparation import prepare_tokens

    return prepare_tokens(config, overrides, guard, _say)


@data.command("inspect", short_help="Print statistics and samples of prepared tokens.")
@PATH
@click.option(
    "--tokenizer", "tokenizer_file", type=TEXT, metavar="FILE",
    help="Tokenizer for the samples; default: the run's own.",
)  # fmt: skip
@click.option("--samples", default=3, type=click.IntRange(0, 1000), help="Documents to print.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@first_rank_command("reading prepared tokens")
def inspect_data(**asked) -> int:
    """Print statistics, samples and defects of prepared tokens.

    PATH is a run directory, or a folder of data.tokens. Defects are duplicate documents, copies of
    held-out ones, documents with two begin-of-text tokens, and documents of one repeated token.

    Exit codes: 0 done, 2 there are no prepared tokens.
    """
    from mpitrain.commands.data.inspection import inspect

    return _answer(inspect(**asked))


@data.command("convert", short_help="Write prepared tokens for other trainers.")
@PATH
@click.option("--to", "target", required=True, type=NAME, help="File to write: .bin, .ds or .npy.")
@first_rank_command("writing tokens")
def convert_data(**asked) -> int:
    """Write prepared tokens as .bin and .idx of Megatron-LM, .ds of datatrove, or .npy.

    PATH is a run directory, or a folder of data.tokens. `mpitrain data prepare` reads these formats.

    Exit codes: 0 done, 2 there are no prepared tokens, or the format can't hold them.
    """
    from mpitrain.commands.data.inspection import convert

    return _answer(convert(**asked))


@cli.group()
def ckpt() -> None:
    """Inspect, verify, compare, rewrite and remove checkpoints.

    PATH is a run directory, its checkpoints, or the folder of one step. Under mpirun ranks share
    the reading and writing.
    """


STEP = click.option("--step", type=click.IntRange(0), help="Step; default: the newest.")
ONLY_STEP = click.option("--step", type=click.IntRange(0), help="Only this step; default: all steps.")


@ckpt.command("inspect", short_help="Print who wrote checkpoints, their contents, and damage.")
@PATH
@ONLY_STEP
@click.option("--arrays", is_flag=True, help="Also print a line for each array.")
@click.option("--json", is_flag=True, help="Print one JSON object.")
@first_rank_command("looking at checkpoints")
def inspect_checkpoints(**asked) -> int:
    """Print who wrote checkpoints, their contents, and damage. Reads no arrays.

    Exit codes: 0 all are usable, 1 one is damaged, 2 there is none.
    """
    from mpitrain.commands.ckpt.inspect import inspect

    text, code = inspect(**asked)
    _answer(text)
    return code


@ckpt.command("verify", short_help="Read a step and compare every byte with its digests.")
@PATH
@STEP
@click.option("--all", "every", is_flag=True, help="Every step.")
@click.option("--sample", default=1.0, type=Finite(0, 1, min_open=True), help="Share of the chunks to read.")
@team_command
def verify_checkpoints(team: "Team", **asked) -> int:
    """Read a step and compare every byte with its digests; check that its index is valid HDF5.

    Exit codes: 0 intact, 1 damaged, or an index that other programs can't open; 2 there is none.
    """
    from mpitrain.commands.ckpt.maintenance import verify

    return verify(team, say=_answer, **asked)


@ckpt.command("diff")
@click.argument("one", metavar="A", type=NAME)
@click.argument("other", metavar="B", type=NAME)
@click.option(
    "--only", default="", show_default=False, metavar="PREFIX",
    help="Only arrays with this prefix, such as parameters/",
)  # fmt: skip
@team_command
def diff_checkpoints(team: "Team", **asked) -> int:
    """Print the differences between two steps, whatever layouts wrote them.

    Exit codes: 0 the arrays have equal digests, 1 they differ or can't be read, 2 there is no
    checkpoint or its index can't be read.
    """
    from mpitrain.commands.ckpt.diff import diff

    return diff(team, say=_answer, **asked)


@ckpt.command("reshard", short_help="Rewrite a step in another number of files.")
@PATH
@click.argument("target", type=NAME)
@STEP
@click.option("--shards", default=1, type=RANKS, help="Files that hold the arrays.")
@team_command
def reshard_checkpoint(team: "Team", **asked) -> int:
    """Write a step into the folder TARGET in another number of files; one file holds every array whole.

    Exit codes: 0 done, the root digest is the same; 1 or 2 it could not be read or written.
    """
    from mpitrain.commands.ckpt.maintenance import rewrite

    return rewrite(team, say=_answer, **asked)


@ckpt.command("repair", short_help="Repair the index of steps that HDF5 refuses.")
@PATH
@ONLY_STEP
@first_rank_command("rewriting indexes")
def repair_checkpoints(**asked) -> int:
    """Rewrite the index of steps that other programs can't open: those written with h5py before 3.16.

    Reads no arrays.

    Exit codes: 0 done, or nothing to do; 1 a step has other damage; 2 there is none, or a run
    uses them.
    """
    from mpitrain.commands.ckpt.maintenance import repair

    return repair(say=_answer, **asked)


@ckpt.command("prune")
@PATH
@click.option("--keep", required=True, type=click.IntRange(1), help="Number of newest steps to keep.")
@click.option(
    "--every", default=0, type=click.IntRange(0), help="Also keep steps that are multiples of this; 0: none."
)
@click.option(
    "--best", default=0, type=click.IntRange(0),
    help="Also keep this many best steps, by default those with the lowest validation loss.",
)  # fmt: skip
@click.option(
    "--best-by", default="val_loss", metavar="METRIC", type=NAME,
    help="Metric of --best, as in --step best:METRIC.",
)  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Print what would be removed; remove nothing.")
@first_rank_command("removing steps")
def prune_checkpoints(**asked) -> int:
    """Remove old steps. The newest intact step is verified first and kept.

    Exit codes: 0 done, 2 no step is intact.
    """
    from mpitrain.commands.ckpt.maintenance import prune

    return prune(say=_answer, **asked)
