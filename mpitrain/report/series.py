"""The steps of a metrics.jsonl as columns of numbers, thinned for a picture."""

import math
import os
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, NamedTuple, TypeVar

import msgspec
import numpy as np
from msgspec import Meta

from mpitrain.cluster.rundir import MOST_LINE_BYTES
from mpitrain.inputs import decoded, open_regular

MOST_POINTS = 1500  # of a curve: a screen has no more columns
# what a run can have computed: sums and products of two stay finite
Number = Annotated[float, Meta(ge=-1e100, le=1e100)] | None
Share = Annotated[float, Meta(ge=0, le=1)]


class AxisCost(msgspec.Struct):
    """What an axis cost rank 0 in a step."""

    bytes: Number = None
    blocked_s: Number = None
    overlapped_s: Number = None


class CostLine(msgspec.Struct):
    """What a step of a line cost rank 0: axes, the ranks that it waited for, and why it stood still."""

    comm: dict[str, AxisCost] = {}
    idle: dict[str, Number] = {}
    waited_for: dict[str, Number] = {}


class LoadsLine(msgspec.Struct):
    """The loads of experts of a line, by block."""

    step: int
    expert_loads: dict[str, list[Share]] = {}


class SamplesLine(msgspec.Struct):
    """Answers of a line, by task."""

    step: int
    samples: dict[str, list[dict[str, Any]]] = {}


class EvaluationsLine(msgspec.Struct):
    """What sources and tasks were evaluated to, by name and metric."""

    evaluations: dict[str, dict[str, Number]] = {}


Kind = TypeVar("Kind")

# what a page shows of a line; the rest isn't read
NUMBERS = (
    *("loss", "val_loss", "grad_norm", "lr", "tokens", "tokens_per_s", "step_s", "time", "mfu", "hfu"),
    *("skipped", "rollbacks", "load_cv", "grad_signal", "grad_noise"),
)
STEP = ("step", Annotated[int, Meta(ge=0, le=2**53)])
NUMBERS_OF_STEP = [(name, Number, None) for name in NUMBERS]
StepLine = msgspec.defstruct("StepLine", [STEP, *NUMBERS_OF_STEP, ("spike", bool, False)])
COLUMNS = ("step", *NUMBERS, "spike")
SAMPLED = 64  # last steps, whose communication is averaged
MOST_NAMES = 32  # of axes or ranks
MOST_LETTERS = 100  # of the name of an evaluation
MOST_EVALUATIONS = 12  # curves of sources and tasks
NOISE_STEPS = 100  # over whose mean the noise scale is taken


class StepSeries(NamedTuple):
    """What is drawn of steps. columns: with `noise_scale`, and NAME/METRIC of evaluations."""

    columns: Mapping[str, np.ndarray]  # float64 each, NaN where a line has nothing
    num_spikes: int
    damaged: int  # lines that can't be read
    comm: dict[str, AxisCost]  # costs of axes, summed over num_sampled steps
    waits: dict[str, float]  # seconds that rank 0 waited for others in these
    num_sampled: int
    idle: dict[str, float]  # seconds that rank 0 stood still in these, by reason
    loads: LoadsLine | None  # of the newest step that has them
    samples: SamplesLine | None  # likewise

    def last(self, name: str) -> float:
        """Return the last finite number of a column, NaN if there is none."""
        column = self.columns.get(name, np.empty(0))
        return float(next(reversed(column[np.isfinite(column)]), math.nan))

    def median(self, name: str) -> float:
        """Return the median of a column, NaN if there is none."""
        return median_of(self.columns.get(name, np.empty(0)))


def median_of(column: np.ndarray) -> float:
    """Return the median of the finite numbers, NaN if there is none."""
    known = column[np.isfinite(column)]
    return float(np.median(known)) if len(known) else math.nan


class StepReader:
    """Reads a metrics.jsonl of a run that may be writing it: what is new, each time it is asked."""

    def __init__(self, path: Path):
        self._path = path
        self._decode = msgspec.json.Decoder(StepLine).decode
        self._forget()

    def _forget(self) -> None:
        self._read_to = 0
        self._inode = 0
        self._last = b""
        self._rows = array("d")
        self._newest = deque[bytes](maxlen=SAMPLED)
        self._loads = b""
        self._samples = b""
        self._evaluations: dict[str, list[tuple[int, float]]] = {}  # by name: places in _rows, values
        self._damaged = 0

    def read(self) -> StepSeries:
        """Return all steps so far. A step that stands twice counts as its last line has it. Raises OSError.

        A file that was cut or replaced, as a run does that resumes, is read from its beginning.
        """
        torn = 0
        with open(open_regular(self._path), "rb") as file:
            if not self._continues(file):
                self._forget()
                self._inode = os.fstat(file.fileno()).st_ino
            file.seek(self._read_to)
            for line in iter(lambda: file.readline(MOST_LINE_BYTES), b""):
                whole = line.endswith(b"\n")
                known = not line.strip() or self._take(line)
                if not known and not whole:
                    torn = 1  # it is being written, or was when the run was killed, or is none
                    break
                self._damaged += not known
                self._read_to += len(line)
                self._last = line[-64:]
        return self._series(torn)

    def _continues(self, file: BinaryIO) -> bool:
        if os.fstat(file.fileno()).st_ino != self._inode:
            return False
        file.seek(self._read_to - len(self._last))
        return file.read(len(self._last)) == self._last

    def _take(self, line: bytes) -> bool:
        try:
            read = self._decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return False
        self._rows.extend(math.nan if x is None else x for x in msgspec.structs.astuple(read))
        self._newest.append(line)
        if b'"expert_loads"' in line:
            self._loads = line
        if b'"samples"' in line:
            self._samples = line
        if b'"evaluations"' in line:
            self._take_evaluations(line)
        return True

    def _take_evaluations(self, line: bytes) -> None:
        read = _line_of(EvaluationsLine, line)
        place = len(self._rows) // len(COLUMNS) - 1
        for name, metrics in read.evaluations.items() if read else ():
            for metric, value in metrics.items():
                key = f"{name}/{metric}"[:MOST_LETTERS]
                is_drawn = key in self._evaluations or len(self._evaluations) < MOST_EVALUATIONS
                if value is not None and is_drawn:
                    self._evaluations.setdefault(key, []).append((place, value))

    def _series(self, torn: int) -> StepSeries:
        table = np.array(self._rows).reshape(-1, len(COLUMNS))
        order = np.argsort(table[:, 0], kind="stable")
        steps = table[order, 0]
        order = order[np.append(steps[1:] != steps[:-1], True)[: len(steps)]]
        columns = dict(zip(COLUMNS, table[order].T))
        signal, noise = (_moving_mean(columns.pop(name)) for name in ("grad_signal", "grad_noise"))
        columns["noise_scale"] = np.where(signal > 0, noise / np.where(signal > 0, signal, 1), np.nan)
        for name, values in self._evaluations.items():
            column = np.full(len(table), np.nan)
            for place, value in values:
                column[place] = value
            columns[name] = column[order]
        num_spikes = int(columns.pop("spike").sum())
        newest = _line_of(LoadsLine, self._loads), _line_of(SamplesLine, self._samples)
        return StepSeries(columns, num_spikes, self._damaged + torn, *_costs(self._newest), *newest)


def _line_of(kind: type[Kind], line: bytes) -> Kind | None:
    with suppress(ValueError):
        return decoded(line, kind)
    return None


def _costs(lines: Iterable[bytes]) -> tuple[dict[str, AxisCost], dict[str, float], int, dict[str, float]]:
    """Return what axes and waits cost in the last steps, in all, the number of these, and idle seconds."""
    costs: dict[str, AxisCost] = {}
    waits, idle = defaultdict[str, float](float), defaultdict[str, float](float)
    count = 0
    for line in lines:
        if (read := _line_of(CostLine, line)) is None:
            continue
        count += bool(read.comm)
        for name, cost in islice(read.comm.items(), MOST_NAMES):
            of_axis = costs.setdefault(name, AxisCost(0, 0.0, 0.0))
            for field in AxisCost.__struct_fields__:
                setattr(of_axis, field, getattr(of_axis, field) + (getattr(cost, field) or 0))
        for total, seconds_by_name in ((waits, read.waited_for), (idle, read.idle)):
            for name, seconds in islice(seconds_by_name.items(), MOST_NAMES):
                total[name] += seconds or 0.0
    return costs, waits, count, idle


def _moving_mean(column: np.ndarray) -> np.ndarray:
    """Return the mean of up to NOISE_STEPS numbers up to each; NaN where one of them isn't known."""
    sums = np.cumsum(np.concatenate([[0.0], np.nan_to_num(column)]))
    places = np.arange(len(column))
    first = np.maximum(0, places + 1 - NOISE_STEPS)
    return np.where(np.isfinite(column), (sums[places + 1] - sums[first]) / (places + 1 - first), np.nan)


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
