"""The steps of a metrics.jsonl as columns of numbers, thinned for a picture."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from mpitrain.inputs import open_regular

MOST_LINE_BYTES = 1 << 24
MOST_POINTS = 1500  # of a curve: a screen has no more columns
Number = float | None


class AxisCost(msgspec.Struct):
    """What an axis cost rank 0 in a step."""

    bytes: Number = None
    blocked_s: Number = None
    overlapped_s: Number = None


class StepLine(msgspec.Struct):
    """What a page shows of a line; the rest isn't read."""

    step: Annotated[int, Meta(ge=0, le=2**53)]
    loss: Number = None
    val_loss: Number = None
    grad_norm: Number = None
    lr: Number = None
    tokens: Number = None
    tokens_per_s: Number = None
    step_s: Number = None
    mfu: Number = None
    hfu: Number = None
    skipped: Number = None
    spike: bool = False


class CommLine(msgspec.Struct):
    """The communication of a line."""

    comm: dict[str, AxisCost] = {}


COLUMNS = StepLine.__struct_fields__
SAMPLED = 64  # last steps, whose communication is averaged


class StepSeries(NamedTuple):
    """columns: float64 each, NaN where a line has nothing.

    damaged: lines that can't be read. comm: costs of axes, summed over a sample of steps.
    """

    columns: Mapping[str, np.ndarray]
    num_spikes: int
    damaged: int
    comm: dict[str, AxisCost]
    num_comm: int


def read_steps(path: Path) -> StepSeries:
    """Read a metrics.jsonl, of a run that may be writing it. Raises OSError.

    A step that stands twice counts as its last line has it.
    """
    decode = msgspec.json.Decoder(StepLine).decode
    rows: dict[int, tuple[Any, ...]] = {}
    newest = deque[bytes](maxlen=SAMPLED)
    damaged = 0
    for line in _lines(path):
        try:
            read = decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            damaged += 1
            continue
        rows[read.step] = msgspec.structs.astuple(read)
        newest.append(line)
    table = np.array(list(rows.values()), np.float64).reshape(len(rows), len(COLUMNS))
    table = table[np.argsort(table[:, 0], kind="stable")]
    columns = dict(zip(COLUMNS, table.T))
    comm, num_comm = _communication(newest)
    return StepSeries(columns, int(columns.pop("spike").sum()), damaged, comm, num_comm)


def _lines(path: Path) -> Iterator[bytes]:
    with open(open_regular(path), "rb") as file:
        for line in iter(lambda: file.readline(MOST_LINE_BYTES), b""):
            if line.strip():
                yield line


def _communication(lines: Iterable[bytes]) -> tuple[dict[str, AxisCost], int]:
    """Return what axes cost in the last steps, in all, and the number of these steps."""
    costs: dict[str, AxisCost] = {}
    count = 0
    for line in lines:
        try:
            read = msgspec.json.decode(line, type=CommLine).comm
        except (msgspec.MsgspecError, ValueError):
            continue
        count += bool(read)
        for name, cost in list(read.items())[:32]:
            total = costs.setdefault(name, AxisCost(0, 0.0, 0.0))
            for field in AxisCost.__struct_fields__:
                value = getattr(cost, field)
                setattr(total, field, getattr(total, field) + (0 if value is None else value))
    return costs, count


def thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the finite points of a curve, or of each stretch of many its lowest and highest."""
    there = np.isfinite(x) & np.isfinite(y)
    x, y = x[there], y[there]
    if len(x) <= MOST_POINTS:
        return x, y
    edges = np.linspace(0, len(x), MOST_POINTS // 2 + 1).astype(int)
    kept = {0, len(x) - 1}
    for begin, end in zip(edges, edges[1:]):
        kept |= {begin + int(y[begin:end].argmin()), begin + int(y[begin:end].argmax())}
    places = np.array(sorted(kept))
    return x[places], y[places]
