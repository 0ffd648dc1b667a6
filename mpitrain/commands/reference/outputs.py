"""What a run writes for other programs: fields of its files, and exit codes.

The words are the comments beside the keys, in the functions that write them.
"""

from functools import cache
from typing import NamedTuple

from mpitrain.commands.reference.comments import words_of_constants, words_of_keys, words_of_texts

TRAINER = "mpitrain.training.trainer"
EXPERT_LOADS = "mpitrain.training.expert_loads"


class Writer(NamedTuple):
    """A function that makes some fields of a file. under: the field that holds them; "" for none."""

    module: str
    function: str
    under: str = ""


FILES = {
    "metrics.jsonl": (
        Writer(TRAINER, "_line"),
        Writer(TRAINER, "_line_of_step"),
        Writer(TRAINER, "validate"),
        Writer("mpitrain.training.checks.comm_report", "end", "comm.AXIS."),
        Writer("mpitrain.training.saving.saver", "lines"),
        Writer("mpitrain.training.saving.saver", "line", "saves[]."),
    ),
    "trace.json": (
        Writer("mpitrain.actor.trace", "write_trace"),
        Writer("mpitrain.actor.trace", "_event", "traceEvents[]."),
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
        found["expert_loads"] = words_of_constants(EXPERT_LOADS)["KEY"]
    return found


def exit_codes() -> dict[int, str]:
    """Return the exit codes of mpitrain, each with its words."""
    from mpitrain import errors

    words = words_of_constants(errors.__name__)
    return {getattr(errors, name): words[name] for name in EXIT_CODES}
