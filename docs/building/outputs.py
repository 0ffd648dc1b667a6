"""What a run writes for other programs: fields of its files, and exit codes.

The words are the comments beside the keys, in the functions that write them.
"""

import ast
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from mpitrain import errors
from mpitrain.commands.reference.comments import named, tree_of, words_at

TRAINER = "mpitrain.training.trainer"


class Writer(NamedTuple):
    """A function that makes some fields of a file. under: the field that holds them; "" for none."""

    module: str
    function: str
    under: str = ""


FILES = {
    "metrics.jsonl": (
        Writer("mpitrain.training.metrics_line", "of_step"),
        Writer(TRAINER, "_line_of_step"),
        Writer(TRAINER, "_validate_if_due"),
        Writer("mpitrain.optim.noise_scale", "estimates"),
        Writer("mpitrain.training.validation", "validate"),
        Writer("mpitrain.training.checks.comm_report", "end", "comm.AXIS."),
        Writer("mpitrain.training.saving.saver", "lines"),
        Writer("mpitrain.training.saving.saver", "line", "saves[]."),
    ),
    "trace.json": (
        Writer("mpitrain.actor.trace", "write_trace"),
        Writer("mpitrain.actor.trace", "_event", "traceEvents[]."),
        Writer("mpitrain.actor.trace", "read", "traceEvents[].args."),
    ),
    "summary.json": (
        Writer("mpitrain.training.run_end", "run_summary"),
        Writer("mpitrain.training.run_end", "_axis", "comm.AXIS."),
    ),
    "profile.json": (Writer("mpitrain.actor.profile_events", "merged"),),
    "ends.jsonl": (Writer("mpitrain.commands.job.again", "main"),),
}
# layers that declare numbers of their own: Layer.metrics
LAYERS = ("mpitrain.model.layers.experts", "mpitrain.model.layers.multi_token")
EXIT_CODES = ("DONE", "FAILED", "BAD_INPUT", "STOPPED_EARLY")


@cache
def fields_of(file: str) -> dict[str, str]:
    """Return the fields of a file that a run writes, each with its words."""
    found = dict[str, str]()
    for writer in FILES[file]:
        for key, words in words_of_keys(writer.module, writer.function).items():
            found[f"{writer.under}{key}"] = words
    if file == "metrics.jsonl":
        for layer in LAYERS:
            found |= words_of_texts(layer, "metrics")
    return found


def exit_codes() -> dict[int, str]:
    """Return the exit codes of mpitrain, each with its words."""
    words = words_of_constants(errors.__name__)
    return {getattr(errors, name): words[name] for name in EXIT_CODES}


def words_of_keys(module: str, owner: str) -> dict[str, str]:
    """Return the words beside each text key of the dictionaries that a function makes."""
    found = dict[str, str]()
    for key, first, last in _keys(named(module, owner)):
        found[key] = found.get(key) or words_at(module, first, last)
    return found


def words_of_texts(module: str, owner: str) -> dict[str, str]:
    """Return the words beside each text of the tuples of a function or field."""
    tuples = [each for each in ast.walk(named(module, owner)) if isinstance(each, ast.Tuple)]
    texts = [each for several in tuples for each in several.elts if isinstance(each, ast.Constant)]
    return {
        each.value: words_at(module, each.lineno, each.end_lineno)
        for each in texts
        if isinstance(each.value, str)
    }


def words_of_constants(module: str) -> dict[str, str]:
    """Return the words beside each constant of a module, by its name."""
    found = {}
    for each in tree_of(module).body:
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
            found[each.targets[0].id] = words_at(module, each.lineno, each.end_lineno)
    return found


def _keys(owner: ast.AST) -> Iterator[tuple[str, int, int]]:
    """Yield (key, first line, last line) of entries of dictionaries and of assignments to them."""
    for node in ast.walk(owner):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, key.lineno, value.end_lineno
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
            key = node.targets[0].slice
            if isinstance(key, ast.Constant) and isinstance(key.value, str):
                yield key.value, node.lineno, node.end_lineno
