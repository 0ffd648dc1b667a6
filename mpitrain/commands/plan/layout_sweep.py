"""`mpitrain sweep`: layouts of one's own take steps in the same ranks, measured beside predicted."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.cluster.guard import Guard
from mpitrain.comm.base.world import World
from mpitrain.commands.plan.measured_steps import measured_step
from mpitrain.commands.plan.sweep_layouts import (
    conclude,
    config_of,
    number,
    plan_on,
    predicted_step,
    rates_for,
    read_layouts,
    require_files,
    words_of,
)
from mpitrain.commands.requests import SweepRequest
from mpitrain.errors import ConfigError, InputError, counted
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import Column, tabled, thousands
from mpitrain.plan.predict.memory_limit import computes_on_gpu, held_by_ranks
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.training.run_plan import ranks_of

LOAD = "; load: rows of the most loaded ep rank over the mean (run.expert_load predicts by it)"
COLUMNS = (
    Column("measured s", "measured_s", number), Column("predicted s", "predicted_s", number),
    Column("measured / predicted", "ratio", number), Column("speed", "speed", number),
    Column("tokens/s", "tokens_per_s", thousands), Column("GB/rank", "held_gb", number),
    Column("load", "expert_load", number), Column("layout", "layout"),
)  # fmt: skip


class SweptLayout(NamedTuple):
    """A layout, and what came of it.

    measured_s, predicted_s: seconds of a step. speed: of products before and after the steps, as a
    share of what the machine's file says. held_gb: of the rank with most, by prediction, in 10**9 bytes.
    expert_load: rows of the rank of ep whose experts had most, over the mean. refused: why it can't run,
    else "". What isn't known is None.
    """

    layout: str
    measured_s: float | None = None
    predicted_s: float | None = None
    speed: float | None = None
    tokens_per_s: float | None = None
    held_gb: float | None = None
    expert_load: float | None = None
    refused: str = ""

    @property
    def ratio(self) -> float | None:
        """Measured over predicted seconds."""
        return self.measured_s / self.predicted_s if self.measured_s and self.predicted_s else None


def sweep(asked: SweepRequest, guard: Guard, say: Callable[[str], None]) -> int:
    """Have each layout take steps, and print all. Collective over all ranks.

    Raises InputError, alike on all ranks, for what no layout can do.
    """
    world = guard.connect(may_be_alone=True)
    layouts = world.on_every_rank("reading the layouts", lambda: _read(asked, world.node_ranks))
    world.require_same({"the layouts": repr(layouts)})
    rows = []
    for layout in layouts:
        guard.leave_if_asked(world)
        rows.append(_swept(asked, layout, world, guard))
    return conclude(asked, rows, world, say, _as_text, _picture)


def _read(asked: SweepRequest, node_ranks: int) -> list[str]:
    require_files(asked)
    if asked.over is not None:
        raise ConfigError(
            f"--over {shown(asked.over)} does nothing without --scaling; add --scaling, or leave it out"
        )
    layouts = read_layouts(asked)
    if not layouts:
        raise ConfigError(
            'needed layouts: --layout "parallel.pp=2 pipeline.schedule=zbv", once for each, or --layouts '
            "FILE with one in a line"
        )
    if asked.svg is not None:
        two_keys(asked.svg, layouts)
    rates_for(asked, config_of(asked).config, node_ranks)
    return layouts


def two_keys(svg: str, layouts: Sequence[str]) -> tuple[str, str]:
    """Return the two keys in which layouts differ. Raises ConfigError if they aren't two."""
    every = [_values_of(layout) for layout in layouts]
    keys = dict.fromkeys(key for each in every for key in each)
    found = [key for key in keys if len({each.get(key, "default") for each in every}) > 1]
    if len(found) != 2:
        raise ConfigError(
            f"--svg {shown(svg)}: the layouts differ in {len(found)} keys "
            f"({shown(', '.join(found)) or 'none'}); a heat map needs two, such as "
            "parallel.pp and batch.micro; with --scaling curves are drawn"
        )
    return found[0], found[1]


def _values_of(layout: str) -> dict[str, str]:
    """Return the values of a layout's keys, the last one of a key that is set twice."""
    pairs = (word.partition("=") for word in words_of(layout))
    return {key.strip(): value.strip() for key, _, value in pairs}


def _swept(asked: SweepRequest, layout: str, world: World, guard: Guard) -> SweptLayout:
    """Measure a layout, or say why it can't be. Collective over all ranks."""
    ranks = ranks_of(world)
    try:
        plan = world.on_every_rank(f"planning {layout}", lambda: plan_on(config_of(asked, layout), ranks))
        step = measured_step(plan, world, guard, asked.steps)
    except InputError as error:  # the same on all ranks
        return SweptLayout(layout, refused=error.args[0])
    config = plan.config
    rates = rates_for(asked, config, world.node_ranks)
    held = max(held_by_ranks(plan, computes_on_gpu(config)))
    tokens = config.batch.global_ * config.data.sequence
    load = step.expert_load and step.expert_load.on(layout_of(config, rates))
    return SweptLayout(
        layout, step.seconds, predicted_step(plan, rates).seconds, step.speed(plan, rates),
        tokens / step.seconds, held / 1e9, load if config.parallel.ep > 1 else None,
    )  # fmt: skip


# ---------------------------------------------------------------- what is said


def _as_text(rows: Sequence[SweptLayout], asked: SweepRequest, world: World) -> str:
    measured = sorted((row for row in rows if row.measured_s), key=lambda row: row.measured_s or 0)
    has_load = any(row.expert_load for row in rows)
    columns = [column for column in COLUMNS if has_load or column.key != "expert_load"]
    title = (
        f"{len(measured)} of {counted(len(rows), 'layouts')} on {counted(world.size, 'ranks')}, "
        "fastest first; step times are "
        f"medians of {asked.steps}, GB/rank are predicted; speed: of matrix products during the steps "
        f"over that of the machine's file{LOAD if has_load else ''}:"
    )
    refused = [f"refused: {row.layout}: {row.refused}" for row in rows if row.refused]
    return "\n".join([title, *([tabled(columns, measured)] if measured else []), *refused])


def _picture(rows: Sequence[SweptLayout], asked: SweepRequest, world: World) -> bytes:
    from mpitrain.commands.plan.sweep_picture import heat_map  # matplotlib

    assert asked.svg is not None
    keys = two_keys(asked.svg, [row.layout for row in rows])
    cells = {}
    for row in rows:
        values = _values_of(row.layout)
        cells[values.get(keys[0], "default"), values.get(keys[1], "default")] = row
    speeds = {at: row.tokens_per_s for at, row in cells.items()}
    predicted = {
        at: row.tokens_per_s * row.ratio if row.tokens_per_s and row.ratio else None
        for at, row in cells.items()
    }
    title = f"tokens/s of layouts on {counted(world.size, 'ranks')}"
    return heat_map(keys, speeds, predicted, title)
