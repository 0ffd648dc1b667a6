"""What a run directory holds for a page. It may be a stranger's, damaged, or of a run under way."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from mpitrain.cluster.rundir import RunDir, read_with_origins, require_run
from mpitrain.config import flatten
from mpitrain.errors import InputError
from mpitrain.inputs import read_regular, shown
from mpitrain.report.series import StepSeries, read_steps

MOST_TRACE_BYTES = 1 << 26
MOST_BOXES = 50_000
MOST_ROWS = 200  # of a table
EMPTY = StepSeries({}, 0, 0, {}, 0)


class Instruction(msgspec.Struct, frozen=True):
    """An instruction of trace.json: microseconds on the clock of rank 0."""

    ph: str
    name: str = ""
    pid: int = 0
    tid: int = 0
    ts: float = 0.0
    dur: float = 0.0
    args: dict[str, Any] = {}


class Trace(msgspec.Struct, frozen=True):
    traceEvents: list[Instruction]


class RunEnd(msgspec.Struct, frozen=True):
    """How a start of the run ended."""

    code: int
    step: int
    time: str = ""
    job: str = ""


class RecordedRun(NamedTuple):
    """keys: of the configuration, as (key, value, origin). notes: what couldn't be read."""

    path: str
    steps: StepSeries
    keys: list[tuple[str, str, str]]
    ends: list[RunEnd]
    evaluations: list[dict[str, Any]]
    trace: list[Instruction]
    notes: list[str]


def read_run(path: str) -> RecordedRun:
    """Read a run directory. Raises CheckpointError for a folder that is none."""
    rundir = RunDir(path)
    require_run(rundir)
    notes: list[str] = []
    try:
        steps = read_steps(rundir.metrics)
    except FileNotFoundError:
        steps = EMPTY
    except OSError as error:
        steps = EMPTY
        notes.append(f"metrics.jsonl can't be read: {error.strerror}")
    if steps.damaged:
        notes.append(f"metrics.jsonl: {steps.damaged:,} lines can't be read")
    return RecordedRun(
        path,
        steps,
        _keys(rundir, notes),
        _lines(rundir.ends, RunEnd, notes),
        _lines(rundir.evaluations, dict[str, Any], notes),
        _trace(rundir.trace, notes),
        notes,
    )


def _keys(rundir: RunDir, notes: list[str]) -> list[tuple[str, str, str]]:
    try:
        loaded = read_with_origins(rundir.config)
    except InputError as error:
        notes.append(shown(error.args[0]))
        return []
    values = flatten(loaded.config)
    return [(key, str(value), str(loaded.origins.of(key))) for key, value in values.items()]


def _lines(path: Path, kind: type, notes: list[str]) -> list:
    """Return the last objects of a file of JSON lines; what is none is counted."""
    try:
        content = read_regular(path, MOST_TRACE_BYTES)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        notes.append(f"{path.name} can't be read: {shown(error)}")
        return []
    read, damaged = [], 0
    for line in content.splitlines()[-MOST_ROWS:]:
        try:
            read.append(msgspec.json.decode(line, type=kind))
        except (msgspec.MsgspecError, ValueError, RecursionError):
            damaged += 1
    if damaged:
        notes.append(f"{path.name}: {damaged:,} lines can't be read")
    return read


def _trace(path: Path, notes: list[str]) -> list[Instruction]:
    """Return the instructions of the last step that was traced."""
    try:
        trace = msgspec.json.decode(read_regular(path, MOST_TRACE_BYTES), type=Trace)
    except FileNotFoundError:
        return []
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{path.name} can't be read: {shown(error)}")
        return []
    events = [event for event in trace.traceEvents if event.ph == "X" and abs(event.ts) < 1e15]
    numbers = [event.args.get("step") for event in events]
    last = max((number for number in numbers if type(number) is int), default=0)
    events = [event for event, number in zip(events, numbers) if number == last]
    if len(events) > MOST_BOXES:
        notes.append(f"trace.json: {MOST_BOXES:,} of {len(events):,} instructions are shown")
    return events[:MOST_BOXES]
