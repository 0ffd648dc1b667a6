"""`mpitrain sweep`: layouts of one's own take a few steps in the same ranks, measured beside predicted.

A layout is words as behind --set, `parallel.pp=2 pipeline.schedule=zbv`; a file has one in each line.
"""

import csv
import io
import json
import shlex
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain import config as settings
from mpitrain.cluster.guard import Guard
from mpitrain.comm.base.world import World, connect
from mpitrain.commands.plan.measured_steps import STEPS, seconds_of
from mpitrain.commands.plan.of_config import layout_of, shape_of_resolved
from mpitrain.data.tokenizer import tokenizer_of
from mpitrain.errors import DONE, ConfigError, InputError
from mpitrain.inputs import read_text, replacing, shown
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_limit import computes_on_gpu, held_by_ranks
from mpitrain.plan.predict.node_memory import require_memory
from mpitrain.plan.predict.step_time.layout import require_possible
from mpitrain.plan.predict.step_time.machine import MachineRates, find_machine, machine_of
from mpitrain.plan.predict.step_time.step import is_defined, predict_step
from mpitrain.plan.settings.resolve import resolve
from mpitrain.training.prepare import beginning

MOST_BYTES = 1 << 18  # of a file of layouts
MOST_LAYOUTS = 1_000


class SweepRequest(NamedTuple):
    """What was asked. layouts: as they were typed. file: of more of them. out: a CSV to be written."""

    config: str | None
    overrides: tuple[str, ...]
    layouts: tuple[str, ...] = ()
    file: str | None = None
    machine: str = "laptop"
    steps: int = STEPS
    out: str | None = None
    json: bool = False


class SweptLayout(NamedTuple):
    """A layout, and what came of it.

    measured_s, predicted_s: seconds of a step. held_gb: of the fullest rank, by prediction, in 10**9 bytes.
    refused: why it can't run, else "". What isn't known is None.
    """

    layout: str
    measured_s: float | None = None
    predicted_s: float | None = None
    tokens_per_s: float | None = None
    held_gb: float | None = None
    refused: str = ""


def sweep(asked: SweepRequest, guard: Guard, say: Callable[[str], None]) -> int:
    """Have each layout take steps, and print all. Collective over all ranks.

    Raises InputError, alike on all ranks, for what no layout can do.
    """
    world = connect(guard.place, may_be_alone=True)
    guard.join(world)
    layouts, rates = world.on_every_rank("reading the layouts", lambda: _read(asked))
    world.require_same({"the layouts": repr(layouts)})
    rows = []
    for layout in layouts:
        guard.leave_if_asked(world)
        rows.append(_swept(asked, layout, rates, world, guard))
    if world.rank == 0:
        say(_as_json(rows, asked, world) if asked.json else _as_text(rows, asked, world))
    world.on_first_rank("writing --out", lambda: _write(asked.out, rows))
    return DONE


def _read(asked: SweepRequest) -> tuple[list[str], MachineRates]:
    """Return the layouts and the machine. Raises ConfigError if there are none, or too many."""
    layouts = [each.strip() for each in asked.layouts]
    if asked.file is not None:
        layouts += _lines_of(asked.file)
    if not layouts:
        raise ConfigError(
            'needed layouts: --layout "parallel.pp=2 pipeline.schedule=zbv", once for each, or --layouts '
            "FILE with one in a line"
        )
    if len(layouts) > MOST_LAYOUTS:
        raise ConfigError(f"found {len(layouts):,} layouts, needed at most {MOST_LAYOUTS:,}")
    for layout in layouts:
        settings.load(asked.config, (*asked.overrides, *_words(layout)))  # what is misspelt is no row
    return layouts, machine_of(find_machine(asked.machine))


def _lines_of(path: str) -> list[str]:
    try:
        text = read_text(path, MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"--layouts {shown(path)}: {error.strerror}; give a text file") from None
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def _words(layout: str) -> list[str]:
    """Return a layout as overrides. Raises ConfigError for a quote without its end."""
    try:
        return shlex.split(layout)
    except ValueError as error:
        raise ConfigError(f"layout {shown(layout)}: {error}; quote as in a shell") from None


def _swept(asked: SweepRequest, layout: str, rates: MachineRates, world: World, guard: Guard) -> SweptLayout:
    """Measure a layout, or say why it can't be. Collective over all ranks."""
    try:
        plan = world.on_every_rank(f"planning {layout}", lambda: _plan(asked, layout, world))
        took = seconds_of(plan, world, guard, asked.steps)
    except InputError as error:  # the same on all ranks
        return SweptLayout(layout, refused=error.args[0])
    config = plan.config
    held = max(held_by_ranks(plan, computes_on_gpu(config)))
    tokens = config.batch.global_ * config.data.sequence
    return SweptLayout(layout, took, _predicted_s(plan, rates), tokens / took, held / 1e9)


def _plan(asked: SweepRequest, layout: str, world: World) -> Plan:
    """Return the plan of a run in a layout: what it leaves open is the default."""
    config, _ = beginning(settings.load(asked.config, (*asked.overrides, *_words(layout))))
    tokenizer = tokenizer_of(config.data)
    machine = world.size, tokenizer.vocab, world.num_nodes, world.node_ranks
    plan = plan_of(resolve(config, *machine, needed=tokenizer.needed))
    require_memory(plan)
    plan.training  # noqa: B018  # proved here, where trouble is still an InputError of all ranks
    return plan


def _predicted_s(plan: Plan, rates: MachineRates) -> float | None:
    """Return the seconds of a step by prediction, None for what formulas don't have."""
    shape, layout = shape_of_resolved(plan.config), layout_of(plan.config, rates)
    with suppress(ConfigError):
        require_possible(layout, shape)
        if is_defined(layout):
            return predict_step(shape, layout, rates).seconds
    return None


# ---------------------------------------------------------------- what is said


def _as_text(rows: Sequence[SweptLayout], asked: SweepRequest, world: World) -> str:
    table = [("measured s", "predicted s", "measured / predicted", "tokens/s", "GB/rank", "layout")]
    measured = [row for row in rows if row.measured_s is not None]
    for row in sorted(measured, key=lambda row: row.measured_s or 0.0):
        ratio = row.measured_s / row.predicted_s if row.predicted_s else None
        table.append(
            (
                _number(row.measured_s), _number(row.predicted_s), _number(ratio), f"{row.tokens_per_s:,.0f}",
                _number(row.held_gb), row.layout,
            )
        )  # fmt: skip
    title = (
        f"{len(measured)} of {len(rows)} layouts on these {world.size} ranks, the fastest first; a step is "
        f"the median of {asked.steps}, GB/rank are predicted:"
    )
    refused = [f"refused: {row.layout}: {row.refused}" for row in rows if row.refused]
    return "\n".join([title, *([aligned(table)] if measured else []), *refused])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _as_json(rows: Sequence[SweptLayout], asked: SweepRequest, world: World) -> str:
    tree: dict[str, Any] = {"ranks": world.size, "machine": asked.machine, "steps": asked.steps}
    return json.dumps({**tree, "layouts": [row._asdict() for row in rows]}, indent=1, allow_nan=False)


def _write(path: str | None, rows: Sequence[SweptLayout]) -> None:
    """Write the rows as CSV. Raises ConfigError if the file can't be written."""
    if path is None:
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, SweptLayout._fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row._asdict() for row in rows)
    try:
        with replacing(Path(path)) as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise ConfigError(
            f"--out {shown(path)}: {error.strerror}; give a file in a folder that is there"
        ) from None
