"""The configuration with which a run's model is evaluated: its weights, this job's layout."""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from mpitrain import config as settings
from mpitrain.config import (
    Batch,
    Config,
    LoadedConfig,
    Memory,
    Numerics,
    OptimizerTable,
    Parallel,
    Pipeline,
    SpikesTable,
)
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.plan.settings.resolve import on_one_rank

ROWS, ROW_TOKENS = 8, 4096  # of a microbatch, at most
TABLES = ("parallel", "precision", "comm")
KEYS = ("run.device", "run.threads", "run.compile")
DEGREES = ("tp", "cp", "dp", "pp")
OWN_LAYOUT = (*DEGREES, "ep", "etp", "context", "sequence")
WITHOUT_TRAINING: Mapping[str, Any] = {
    "run.keep_best_by": "val_loss", "run.eval_tasks": (), "run.eval_shots": 0, "experts.replay": "",
    "model.init": "", "data.documents": "joined", "precision.reduce": "same", "run.trace": 0,
    "run.routing": 0, "run.keep": 0, "run.keep_every": 0, "run.keep_best": 0, "run.profile": "",
    "run.staging": "", "run.machine": "",
}  # fmt: skip


def given_keys(given: LoadedConfig) -> dict[str, Any]:
    """Return the keys of --set. Raises ConfigError for one that doesn't belong to an evaluation."""
    keys = {
        key: value for key, value in settings.flatten(given.config).items() if given.origins.is_given(key)
    }
    for key in keys:
        if key not in KEYS and key.partition(".")[0] not in TABLES:
            raise ConfigError(
                f"--set {shown(key)}: an evaluation has keys of the tables {', '.join(TABLES)}, "
                f"and {', '.join(KEYS)}; leave it out"
            )
    return keys


def evaluated(config: Config, keys: Mapping[str, Any], num_ranks: int) -> Config:
    """Return the model of a run for a number of ranks.

    In the run's own layout, if it was of as many and none is given; otherwise as --set says.
    """
    parallel: dict[str, Any] = {}
    if math.prod(getattr(config.parallel, name) for name in DEGREES) == num_ranks and not any(
        key.startswith("parallel.") for key in keys
    ):
        parallel = {name: getattr(config.parallel, name) for name in OWN_LAYOUT}
        if config.parallel.cp == 1:
            del parallel["context"]
        if config.parallel.tp == 1:
            del parallel["sequence"]
    one = msgspec.structs.replace(
        on_one_rank(config), parallel=Parallel(**parallel), pipeline=Pipeline(), batch=Batch(),
        memory=Memory(), numerics=Numerics(), spikes=SpikesTable(),
        optimizer=OptimizerTable(name="sgd", momentum=0.0),
    )  # fmt: skip
    return settings.with_values(one, {**WITHOUT_TRAINING, **keys})


def at_length(config: Config, longest: int, limit: int) -> Config:
    """Return the same for sequences of `longest` tokens, in a length that the layout divides.

    Raises ConfigError if `limit`, the context, has no room for that.
    """
    parallel, unit = config.parallel, _unit(config)
    sequence = -(-max(1, longest) // unit) * unit
    if sequence > limit:
        rows = " into multiples of 16 rows, which products of fp8 take" * (config.precision.compute == "fp8")
        raise ConfigError(
            f"a context of {limit} tokens doesn't divide over parallel.cp = {parallel.cp} x "
            f"parallel.tp = {parallel.tp}{rows}; give --context {max(unit, limit // unit * unit)}"
        )
    micro = max(1, min(ROWS, ROW_TOKENS // sequence))
    return settings.with_values(config, {"data.sequence": sequence, "batch.micro": micro})


def usable_context(config: Config, context: int) -> int:
    """Return the longest context, at most `context`, that the layout divides."""
    unit = _unit(config)
    return max(unit, context // unit * unit)


def _unit(config: Config) -> int:
    """Return what divides lengths: the layout, and the 16 rows that fp8's products take."""
    parts = config.parallel.cp * config.parallel.tp
    return (2 * parts if parts > 1 else 1) * (16 if config.precision.compute == "fp8" else 1)
