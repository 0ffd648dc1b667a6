"""What the numbers of metrics.jsonl are called in a logger: the one table of names."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

NAMES = {  # of keys of metrics.jsonl; None: not logged, and nothing under it
    "step": None,
    "time": None,
    "loss": "train/loss",
    "grad_norm": "train/grad_norm",
    "lr": "train/lr",
    "tokens": "train/tokens",
    "read": "train/tokens_read",
    "skipped": "train/skipped_updates",
    "rollbacks": "train/rollbacks",
    "spike": "train/spike",
    "loss_scale": "train/loss_scale",
    "val_loss": "eval/loss",
    "evaluations": "eval",
    "tokens_per_s": "perf/tokens_per_second",
    "step_s": "perf/step_seconds",
    "theoretical_s": "perf/theoretical_step_seconds",
    "mfu": "perf/mfu",
    "hfu": "perf/hfu",
    "peak_in_flight": "perf/microbatches_in_flight",
    "comm": "perf/comm",
    "idle": "perf/idle_s",
    "waited_for": None,  # by rank: as many names as there are ranks
}
OTHERS = "train"  # numbers of layers and what else there is


def values_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a line by their names. null, a number that isn't finite, is NaN."""
    values: dict[str, float] = {}
    for key, value in line.items():
        name = NAMES.get(key, f"{OTHERS}/{key}")
        if name is not None:
            values.update(_numbers(name, value))
    return values


def _numbers(name: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif value is None:
        yield name, math.nan
    elif isinstance(value, int | float):
        yield name, value
