"""Published steps from a CSV: each row becomes a model, a layout and figures, or is refused.

A row that contradicts itself is refused by name, and so is one that leaves out what decides: model,
ranks, batch, layout. What is unknown but bounded (recomputation, the microbatch of ZeRO-3) makes
several layouts, between which the truth lies.
"""

import csv
import io
import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from mpitrain.errors import ConfigError
from mpitrain.inputs import os_errors_as, read_text, shown
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.layout import require_possible
from mpitrain.plan.predict.step_time.machine import MachineFile, find_machine, known_machine
from mpitrain.plan.predict.step_time.step import recomputed_flops
from mpitrain.plan.predict.step_time.step_model import StepModel
from mpitrain.planner.assumed import Convention, convention_of
from mpitrain.planner.row_layout import DIFFER, Incomplete, layouts_in, model_in, number_in

MOST_BYTES = 32 << 20
MOST_COLUMNS = 1_000  # each row is held with all of them
MOST_ROWS = 2_000  # of which each is predicted, for seconds of all
NEEDED = ("system", "model", "gpu_type")
HALVES = ("half", "split", "fold")  # the column that says which rows are fitted to
EXACT = {"iter_s", "tok_s_gpu", "samples_s_gpu"}  # columns that say a step's time without its FLOPs
FITTED = ("fit", "train", "a", "0", "calibrate")


class PublishedFigures(NamedTuple):
    """What was published: seconds of a step, and bytes of a rank, if any."""

    seconds: float | None
    memory_bytes: float | None


class Row(NamedTuple):
    """A row that can be predicted. layouts: more than one where what is unknown decides.

    assumed: fields and the values taken for them.
    fitted: whether it is in the half that is fitted to. source: paper or repository, without its table.
    """

    id: str
    system: str
    model: StepModel
    machine: MachineFile
    layouts: tuple[StepLayout, ...]
    measured: PublishedFigures
    assumed: Mapping[str, str]
    convention: Convention
    sweep: str
    fitted: bool | None
    source: str

    @property
    def layout(self) -> StepLayout:
        return self.layouts[0]

    @property
    def whole_system(self) -> str:
        """Machine, framework and release."""
        return f"{self.system} on {self.machine.name}"

    @property
    def framework(self) -> str:
        """The system without its release."""
        return re.sub(r"[0-9.]+.*", "", self.system.lower()).strip()

    @property
    def regime(self) -> str:
        kind = "experts" if self.model.experts else "dense"
        return f"{kind} {self.layout.compute}"

    @property
    def is_interval(self) -> bool:
        return len(self.layouts) > 1


class Refused(NamedTuple):
    """A row that can't be predicted, and why."""

    id: str
    system: str
    why: str
    incomplete: bool  # else it contradicts itself


def read_rows(path: str, machine: str = "") -> tuple[list[Row], list[Refused]]:
    """Read a CSV of published steps. Raises ConfigError for a file that is none.

    machine: a name or a machine's file, for rows whose gpu_type is empty or names it.
    """
    own = find_machine(machine) if machine else None
    with os_errors_as(ConfigError, shown(path), "give a CSV file of published steps"):
        text = read_text(path, MOST_BYTES)
    try:
        return _rows(path, csv.DictReader(io.StringIO(text)), own)
    except csv.Error as error:  # a field of more than 131,072 characters
        raise ConfigError(f"{shown(path)}: {shown(error)}; give a CSV file of published steps") from None


def _rows(
    path: str, reader: "csv.DictReader[str]", own: MachineFile | None
) -> tuple[list[Row], list[Refused]]:
    if (columns := len(reader.fieldnames or ())) > MOST_COLUMNS:
        raise ConfigError(
            f"{shown(path)}: found {columns:,} columns, at most {MOST_COLUMNS:,} are read; leave some out"
        )
    missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
    if missing:
        names = ", ".join(reader.fieldnames or ())
        found = f"the columns {shown(names)}" if names else "no columns"
        raise ConfigError(
            f"{shown(path)}: found {found}; needed {', '.join(missing)} too, as "
            "in benchmarks/published_layouts.csv"
        )
    every = list(itertools.islice(reader, MOST_ROWS + 1))
    if len(every) > MOST_ROWS:
        raise ConfigError(f"{shown(path)}: found more than {MOST_ROWS:,} rows; divide the file")
    rows: list[Row] = []
    refused: list[Refused] = []
    for number, raw in enumerate(every, start=2):
        fields = {key: (value or "").strip() for key, value in raw.items() if isinstance(key, str)}
        name = fields.get("id") or f"line {number}"
        try:
            rows.append(_row(name, fields, own))
        except ConfigError as error:
            refused.append(Refused(name, fields["system"], error.args[0], isinstance(error, Incomplete)))
    return rows, refused


def _machine(gpu: str, own: MachineFile | None) -> MachineFile:
    if own is not None and (not gpu or gpu.lower() in {name.lower() for name in (own.name, *own.aliases)}):
        return own
    if not gpu:
        raise Incomplete("gpu_type: found nothing; needed the machine, or --machine")
    return known_machine(gpu)


def _with_cards(machine: MachineFile, gbit: float | None) -> MachineFile:
    """Return the machine with cards of `gbit` a node, of which as large a share is reached."""
    if not gbit:
        return machine
    links, peak = machine.links, gbit / 8 * 1e9 / machine.ranks_per_node
    between = msgspec.structs.replace(
        links.between, peak=peak, sustained=links.between.sustained * peak / links.between.peak
    )
    return msgspec.structs.replace(machine, links=msgspec.structs.replace(links, between=between))


def _row(name: str, fields: Mapping[str, str], own: MachineFile | None) -> Row:
    convention = convention_of(fields["system"])
    assumed: dict[str, str] = {}
    machine = _with_cards(_machine(fields["gpu_type"], own), number_in(fields, "node_gbit"))
    model = model_in(fields, assumed)
    layouts = layouts_in(fields, model, convention, assumed)
    for each in layouts:
        require_possible(each, model)
    layout = layouts[0]
    halves = [fields[key].lower() for key in HALVES if fields.get(key)]
    seconds = dict(_seconds(fields, model, layout, machine, convention))
    measured = _measured(fields, seconds, machine)
    key = (fields["system"], model.name, machine.name, layout.ranks, layout.sequence, layout.batch)
    sweep = fields.get("sweep") or " ".join(map(str, key))
    fitted = halves[0] in FITTED if halves else None
    source = re.split(r"[ @]", fields.get("source") or fields["system"])[0]
    return Row(
        name, fields["system"], model, machine, layouts, measured, assumed, convention, sweep, fitted, source
    )


# ---------------------------------------------------------------- what was measured


def _measured(
    fields: Mapping[str, str], found: Mapping[str, float], machine: MachineFile
) -> PublishedFigures:
    """Return what was published. found: seconds of a step by the key that says them, the surest first."""
    memory = number_in(fields, "mem_gb")
    if memory and memory * 1e9 > 1.3 * machine.memory_bytes:
        raise ConfigError(
            f"mem_gb = {memory:g} contradicts {machine.name}, which has {machine.memory_bytes / 1e9:.0f}"
        )
    oom = "oom" in fields.get("role", "").lower()
    named = list(found)
    for one, other in zip(named, named[1:]):
        exact = {one, other} <= EXACT
        if abs(math.log(found[one] / found[other])) > (DIFFER if exact else 4 * DIFFER):
            raise ConfigError(
                f"{one} = {fields[one]} contradicts {other} = {fields[other]}: steps of "
                f"{found[one]:.3g} and {found[other]:.3g} s"
            )
    seconds = found[named[0]] if named else None
    if seconds is None and memory is None and not oom:
        raise Incomplete("found neither a throughput nor memory; needed one")
    return PublishedFigures(seconds, memory * 2**30 if memory else None)


def _seconds(
    fields: Mapping[str, str],
    model: StepModel,
    layout: StepLayout,
    machine: MachineFile,
    convention: Convention,
) -> Iterator[tuple[str, float]]:
    """Yield each figure of a row that says how long a step took, the surest first."""
    if took := number_in(fields, "iter_s"):
        yield "iter_s", took
    if rate := number_in(fields, "tok_s_gpu"):
        yield "tok_s_gpu", layout.tokens / (rate * layout.ranks)
    if rate := number_in(fields, "samples_s_gpu"):
        yield "samples_s_gpu", layout.batch / (rate * layout.ranks)
    flops = model.flops_per_token(layout.sequence, convention.halved) * layout.tokens / layout.ranks
    again = recomputed_flops(model, layout) / layout.ranks
    counted = convention.counts_recomputed or "HFU, not MFU" in fields.get("note", "")
    peak = machine.products["bf16" if "bf16" in machine.products else next(iter(machine.products))].peak
    if rate := number_in(fields, "tflops_gpu"):
        yield "tflops_gpu", (flops + counted * again) / (rate * 1e12)
    for key, done in (("mfu_pct", flops + counted * again), ("hfu_pct", flops + again)):
        if share := number_in(fields, key):
            if share > 100:
                raise ConfigError(f"{key} = {share:g}: no machine does more than its peak")
            yield key, done / (share / 100 * peak)
            return
