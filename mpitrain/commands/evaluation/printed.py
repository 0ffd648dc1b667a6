"""`mpitrain eval`: what a step is worth, as a table, as JSON and in the run directory."""

from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.cluster.entry import warn
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.rundir import RunDir
from mpitrain.commands.declared_options import refuse_options
from mpitrain.commands.evaluation.evaluated_run import evaluate
from mpitrain.commands.output_file import require_file, write
from mpitrain.commands.requests import EvaluationRequest
from mpitrain.config import read
from mpitrain.errors import DONE, ConfigError, counted
from mpitrain.evaluation.tasks import METRICS, samples
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import as_json

SHOWN_OF_TEXTS = ("tokens", "loss", "perplexity", "bits_per_byte")
OF_TASKS = ("examples", *METRICS)


def main(request: EvaluationRequest, guard: Guard, say: Callable[[str], None]) -> int:
    """Evaluate, print and keep the result. Collective over all ranks."""
    world = guard.connect(may_be_alone=True)
    world.on_first_rank("looking at what is evaluated", lambda: _require_files(request))
    if (out := request.out) is not None:
        read_files = (*request.data, *request.tasks, request.tokenizer)
        world.on_first_rank("looking at --out", lambda: require_file("--out", out, (), read_files))
    given = world.on_every_rank("reading --set", lambda: read(None, request.overrides))
    result = evaluate(request, given, world, guard.place)
    if world.rank == 0:
        say(table(result))
        _keep(request.path, result)
    if out is not None:
        content = f"{as_json(result)}\n".encode()
        world.on_first_rank("writing --out", lambda: write("--out", out, content))
    return DONE


def _require_files(request: EvaluationRequest) -> None:
    """Raise ConfigError unless there is a file, and each once; and for an option of the other kind."""
    if not request.data and not request.tasks:
        raise ConfigError("found neither --data nor --tasks; give a file to evaluate")
    given = {"--data": request.data, "--tasks": request.tasks}
    for option, idle in (("--data", ("--text-key", "--stride")), ("--tasks", ("--shots",))):
        if not given[option]:
            refuse_options(request, idle, f"does nothing without {option}; add {option}, or leave it out")
    for option, names in given.items():
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"{option} {shown(twice)} is given twice; give it once")


def table(result: Mapping[str, Any]) -> str:
    """Return a result in lines."""
    context = f"context {counted(result['context'], 'tokens')}"
    shots = f", {counted(result['shots'], 'examples')} before each" * bool(result["shots"])
    lines = [f"step {result['step']}, {context}, stride {result['stride']}{shots}"]
    for name, numbers in result.get("data", {}).items():
        values = ", ".join(f"{key} {_number(numbers[key])}" for key in SHOWN_OF_TEXTS)
        lines.append(f"{shown(name)}: {values}")
    for name, numbers in result.get("tasks", {}).items():
        metrics = [key for key in OF_TASKS if key in numbers]
        values = ", ".join(f"{key} {_number(numbers[key])}{_error(numbers, key)}" for key in metrics)
        lines.append(f"{shown(name)}: {values}")
    return "\n".join(lines)


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _error(numbers: Mapping[str, Any], key: str) -> str:
    error = numbers.get(f"{key}_stderr")
    return "" if error is None else f" +- {error:.4f}"


def _keep(path: str, result: Mapping[str, Any]) -> None:
    """Add a line to the run's evaluations.jsonl; a folder that can't be written keeps none."""
    tasks = {name: _without_answers(numbers) for name, numbers in result.get("tasks", {}).items()}
    line = {**result, **({"tasks": tasks} if tasks else {})}
    try:
        RunDir(path).append_evaluation(as_json(line, None))
    except OSError as error:
        warn(f"warning: {shown(path)} doesn't keep the result: {error.strerror}")


def _without_answers(numbers: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in numbers.items() if key != "answers"}
    return {**kept, "samples": samples(numbers["answers"])}
