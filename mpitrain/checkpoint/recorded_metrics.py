"""Metrics of steps in files beside the checkpoints: metrics.jsonl, results of `mpitrain eval`.

Both files may be a stranger's: what can't be read counts for nothing.
"""

import json
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from mpitrain.cluster.rundir import RunDir, lines_of
from mpitrain.errors import CheckpointError

Metrics = dict[str, float]  # by name
COUNTS = {"documents", "tokens", "bytes", "examples"}  # of what was evaluated: no metrics of a step


def recorded_metrics(run_dir: Path, steps: Collection[int]) -> Iterator[dict[int, Metrics]]:
    """Yield the metrics of some steps, first by metrics.jsonl, then by evaluations.jsonl."""
    rundir = RunDir(run_dir)
    for path, metrics_in in ((rundir.metrics, _of_line), (rundir.evaluations, _of_evaluation)):
        found: dict[int, Metrics] = {}
        with suppress(OSError, CheckpointError):
            for line, step in lines_of(path):
                if step in steps:  # of two lines of a step the later one counts
                    found.setdefault(step, {}).update(metrics_in(json.loads(line)))
        yield found


def _of_line(line: dict[str, Any]) -> Metrics:
    named = line.get("evaluations")
    of_tasks = _named(named.items() if isinstance(named, dict) else ())
    return _numbers("", {**line, "step": None}) | of_tasks


def _of_evaluation(result: dict[str, Any]) -> Metrics:
    """Return the metrics of files, named as run.eval_tasks names them."""
    kinds = [files for kind in ("data", "tasks") if isinstance(files := result.get(kind), dict)]
    items = [item for files in kinds for item in files.items()]
    return _named((Path(name).name.removesuffix(".jsonl"), of) for name, of in items)


def _named(items: Collection[tuple[str, Any]] | Iterator[tuple[str, Any]]) -> Metrics:
    numbers = {key: x for name, of in items for key, x in _numbers(f"{name}/", of).items()}
    return {key: x for key, x in numbers.items() if not _is_no_metric(key.rpartition("/")[2])}


def _is_no_metric(name: str) -> bool:
    return name in COUNTS or name.endswith("_stderr")


def _numbers(prefix: str, values: Any) -> Metrics:
    items = values.items() if isinstance(values, dict) else ()
    known = [(key, x) for key, x in items if type(x) in (int, float)]
    return {f"{prefix}{key}": float(x) for key, x in known if abs(x) < 1e300}
