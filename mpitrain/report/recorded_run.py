"""What a run directory holds for a page. It may be a stranger's, damaged, or of a run under way."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from mpitrain.cluster.rundir import RunDir, read_with_origins, require_run
from mpitrain.config import flatten
from mpitrain.errors import InputError, counted
from mpitrain.inputs import decoded, read_regular, shown
from mpitrain.report.series import StepReader, StepSeries

MOST_TRACE_BYTES = 1 << 26
MOST_AXES = 16  # of an instruction
MOST_SUMMARY_BYTES = 1 << 24
MOST_BOXES = 50_000
MOST_ROWS = 200  # of a table
Kind = TypeVar("Kind", bound=msgspec.Struct)
EMPTY = StepSeries({}, 0, 0, {}, {}, 0, {}, None, None)


class Instruction(msgspec.Struct, frozen=True):
    """An instruction of trace.json: microseconds on the clock of rank 0."""

    ph: str
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    cat: str = ""
    args: dict[str, Any] = {}

    @property
    def megabytes(self) -> float:
        """What the rank sent meanwhile; 0 where nobody counted."""
        return (_number(self.args.get("bytes")) or 0.0) / 1e6

    @property
    def held_mb(self) -> float | None:
        """The memory of the rank after it, if somebody looked."""
        held = _number(self.args.get("held"))
        return None if held is None else held / 1e6

    @property
    def blocked_ms(self) -> dict[str, float]:
        """For how long the rank stood still meanwhile, by axis."""
        blocked = self.args.get("blocked_s")
        axes = islice(blocked.items(), MOST_AXES) if isinstance(blocked, dict) else ()
        return {axis: 1e3 * waited for axis, value in axes if (waited := _number(value))}


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and abs(value) < 1e18 else None


class Trace(msgspec.Struct, frozen=True):
    traceEvents: list[Instruction]


class RunEnd(msgspec.Struct, frozen=True):
    """How a start of the run ended."""

    code: int
    step: int
    time: str = ""
    job: str = ""
    began: str = ""
    reached: int | None = None

    @property
    def lost(self) -> int | None:
        """Steps that the next start computes again."""
        return None if self.reached is None else max(0, self.reached - self.step)


class MemoryPart(msgspec.Struct, frozen=True):
    """Bytes of rank 0. measured: None if nothing measures it alone."""

    part: str
    predicted: float
    measured: float | None = None


class AxisSummary(msgspec.Struct, frozen=True):
    """What an axis cost a rank in a step, in the mean; worst_s: the rank that was blocked longest."""

    bytes: float = 0.0
    blocked_s: float = 0.0
    overlapped_s: float = 0.0
    worst_s: float = 0.0
    worst_rank: int = 0


class RunSummary(msgspec.Struct, frozen=True):
    """What summary.json has: what a run knows at its end alone."""

    nodes: list[str] = []
    axes: dict[str, int] = {}
    comm: dict[str, AxisSummary] = {}
    slow: dict[str, int] = {}
    memory: list[MemoryPart] = []
    predicted_s: dict[str, float] = {}
    measured_s: dict[str, float] = {}
    stages: list[dict[str, float]] = []


class RecordedRun(NamedTuple):
    """keys: of the configuration, as (key, value, origin). notes: what couldn't be read."""

    path: str
    steps: StepSeries
    keys: list[tuple[str, str, str]]
    ends: list[RunEnd]
    evaluations: list[dict[str, Any]]
    trace: list[Instruction]
    summary: RunSummary
    notes: list[str]


class RunReader:
    """Reads a run directory, again and again. Raises CheckpointError for a folder that is none."""

    def __init__(self, path: str):
        self._path = path
        self._rundir = RunDir(path)
        require_run(self._rundir)
        self._steps = StepReader(self._rundir.metrics)
        self._trace: tuple[object, list[Instruction], list[str]] = (None, [], [])

    def seen(self) -> list[tuple[int, ...]]:
        """Return what changes with any of the files that are read."""
        run = self._rundir
        files = (run.config, run.metrics, run.ends, run.evaluations, run.trace, run.summary)
        return [_stamp(path) for path in files]

    def read(self) -> RecordedRun:
        """Return what the directory holds now."""
        notes: list[str] = []
        rundir = self._rundir
        return RecordedRun(
            self._path,
            self._read_steps(notes),
            _keys(rundir, notes),
            _lines(rundir.ends, RunEnd, notes),
            _lines(rundir.evaluations, dict[str, Any], notes),
            self._read_trace(notes),
            _decoded(rundir.summary, MOST_SUMMARY_BYTES, RunSummary(), notes),
            notes,
        )

    def _read_steps(self, notes: list[str]) -> StepSeries:
        try:
            steps = self._steps.read()
        except FileNotFoundError:
            return EMPTY
        except OSError as error:
            notes.append(f"metrics.jsonl can't be read: {error.strerror}")
            return EMPTY
        if steps.damaged:
            notes.append(f"metrics.jsonl: {counted(steps.damaged, 'lines', ',')} can't be read")
        return steps

    def _read_trace(self, notes: list[str]) -> list[Instruction]:
        """Return the trace, which is large, as it was read if its file is the same."""
        stamp = _stamp(self._rundir.trace)
        if stamp != self._trace[0]:
            said: list[str] = []
            self._trace = (stamp, _trace(self._rundir.trace, said), said)
        notes += self._trace[2]
        return self._trace[1]


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.lstat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def read_run(path: str) -> RecordedRun:
    """Read a run directory once. Raises CheckpointError for a folder that is none."""
    return RunReader(path).read()


def _keys(rundir: RunDir, notes: list[str]) -> list[tuple[str, str, str]]:
    try:
        loaded = read_with_origins(rundir.config)
    except InputError as error:
        notes.append(shown(error.args[0]))
        return []
    return [
        (key, x if isinstance(x, str) else json.dumps(x, default=str), str(loaded.origins.of(key)))
        for key, x in flatten(loaded.config).items()
    ]


def _lines(path: Path, kind: type, notes: list[str]) -> list:
    """Return the last objects of a file of JSON lines; what is none is counted."""
    content = b""
    with _noted(path, notes):
        content = read_regular(path, MOST_TRACE_BYTES)
    lines = content.splitlines()[-MOST_ROWS:]
    read = []
    for line in lines:
        with suppress(ValueError):
            read.append(decoded(line, kind))
    if damaged := len(lines) - len(read):
        notes.append(f"{path.name}: {counted(damaged, 'lines', ',')} can't be read")
    return read


def _decoded(path: Path, most_bytes: int, absent: Kind, notes: list[str]) -> Kind:
    """Return what a file of JSON holds; `absent`, of its type, where it is absent or damaged."""
    with _noted(path, notes):
        return msgspec.json.decode(read_regular(path, most_bytes), type=type(absent))
    return absent


@contextmanager
def _noted(path: Path, notes: list[str]) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError:
        pass
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} can't be read: {shown(error)}")


def _trace(path: Path, notes: list[str]) -> list[Instruction]:
    trace = _decoded(path, MOST_TRACE_BYTES, Trace([]), notes)
    whole = [event for event in trace.traceEvents if event.ph == "X"]
    events = [event for event in whole if max(abs(event.ts), abs(event.dur)) < 1e15]
    numbers = (event.args.get("step") for event in events)
    last = max((number for number in numbers if type(number) is int), default=0)
    events = [event for event in events if event.args.get("step") == last]
    if len(events) > MOST_BOXES:
        notes.append(f"trace.json: {MOST_BOXES:,} of {len(events):,} instructions are shown")
    return events[:MOST_BOXES]
