"""`mpitrain sweep --scaling`: the first 1, 2, 4, ... ranks of a job take steps, the others wait.

strong      the same batch on each number of ranks
weak        batch.global is of the smallest number, and grows with the ranks
efficiency  tokens/s of a rank over those of a rank on the smallest number, of the same layout
waiting     of a step, where nothing hides messages: as measured, of the rank that waited least; as
            predicted, exposed messages and the schedule's bubble
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from mpitrain.cluster.guard import Guard
from mpitrain.comm.base.world import World
from mpitrain.commands.plan.measured_steps import MeasuredStep, measured_step
from mpitrain.commands.plan.sweep_layouts import (
    ScaledStep,
    conclude,
    config_of,
    machine_name,
    number,
    plan_on,
    predicted_step,
    rates_for,
    read_layouts,
    require_files,
)
from mpitrain.commands.requests import SweepRequest
from mpitrain.errors import ConfigError, InputError, counted
from mpitrain.inputs import shown
from mpitrain.plan.declared.formatting import Column, tabled, thousands
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.settings.job_ranks import THERE_ARE, JobRanks

MOST_NUMBERS = 64


class ToScale(NamedTuple):
    """A layout as it was typed, "" for the default, and its plan on a number of ranks."""

    typed: str
    ranks: int
    plan: Plan


def sweep_ranks(asked: SweepRequest, guard: Guard, say: Callable[[str], None]) -> int:
    """Have the first ranks of each number take steps, and print all. Collective over all ranks.

    Raises InputError, alike on all ranks, before the first step if a number can't have a layout.
    """
    world = guard.connect(may_be_alone=True)
    plans = world.on_every_rank("planning each number of ranks", lambda: _read(asked, world))
    world.require_same({"the layouts": repr([(each.typed, each.ranks) for each in plans])})
    rows: list[ScaledStep] = []
    for each in plans:
        guard.leave_if_asked(world)
        found = _measured(each, world, guard, asked.steps)
        rows.append(_row(each, found, rates_for(asked, each.plan.config, world.node_ranks), rows))
    return conclude(asked, rows, world, say, _as_text, _picture)


def _measured(each: ToScale, world: World, guard: Guard, steps: int) -> MeasuredStep:
    """Have the first ranks take steps; the others sleep. Collective over all ranks."""
    place, limit_s = guard.place, guard.place.limit_s
    if world.rank >= each.ranks:  # for however long that takes
        place.name(place.who, math.inf)
    what = f"steps on the first {counted(each.ranks, 'ranks')}"
    found: MeasuredStep = world.on_first_ranks(
        each.ranks, what, lambda part: measured_step(each.plan, part, guard, steps)
    )
    place.name(place.who, limit_s)
    return found


# ---------------------------------------------------------------- what is measured


def _read(asked: SweepRequest, world: World) -> list[ToScale]:
    require_files(asked)
    over = _numbers(asked.over, world.size)
    layouts = read_layouts(asked) or [""]
    plans = [each for layout in layouts for each in _plans_of(asked, layout, over, world)]
    for each in plans:
        rates_for(asked, each.plan.config, world.node_ranks)
    return plans


def _numbers(typed: str | None, size: int) -> list[int]:
    """Return numbers of ranks, the smallest first. Raises ConfigError for what can't be one."""
    if typed is None:
        powers = [2**power for power in range(size.bit_length())]
        return powers if powers[-1] == size else [*powers, size]
    words = [word.strip() for word in typed.split(",")]
    digits = [word for word in words if word.isascii() and word.isdecimal()]
    good = [word for word in digits if 1 <= int(word[:9]) <= size]
    bad = [word for word in words if word not in good]
    if bad or len(words) > MOST_NUMBERS or len(set(map(int, good))) < len(words):
        why = f"found {shown(bad[0]) or 'no number'}" if bad else "found one twice, or too many"
        raise ConfigError(
            f"--over {shown(typed)}: {why}; needed numbers from 1 to {size}, the started ranks, "
            f"such as {','.join(map(str, _numbers(None, size)))}"
        )
    return sorted(map(int, good))


def _plans_of(asked: SweepRequest, layout: str, over: Sequence[int], world: World) -> list[ToScale]:
    """Return the plans of a layout; an open batch is what one of the numbers of ranks takes.

    With strong scaling that is the largest number, whose ranks all need sequences.
    """
    open_batch = config_of(asked, layout).config.batch.global_ == 0
    reference = over[-1] if asked.scaling == "strong" and open_batch else over[0]
    batch = _plan(asked, layout, reference, 0, world).config.batch.global_
    plans = []
    for ranks in over:
        scaled = batch * ranks if asked.scaling == "weak" else batch * over[0]
        if scaled % over[0]:
            raise ConfigError(
                f"--scaling weak: batch.global = {batch} on {over[0]} ranks is no whole number of "
                f"sequences on {ranks}; needed a multiple of {over[0]}"
            )
        plans.append(ToScale(layout, ranks, _plan(asked, layout, ranks, scaled // over[0], world)))
    return plans


def _plan(asked: SweepRequest, layout: str, ranks: int, batch: int, world: World) -> Plan:
    """Return the plan on the first ranks, which fill nodes in order. Raises InputError."""
    per_node = world.node_ranks
    nodes = -(-ranks // per_node) if per_node else world.num_nodes
    even = per_node and (ranks % per_node == 0 or ranks < per_node)
    first = JobRanks(ranks, nodes, min(ranks, per_node) if even else 0, THERE_ARE)
    try:
        return plan_on(config_of(asked, layout), first, batch)
    except InputError as error:
        where = f"on {counted(ranks, 'ranks')}" + (f", {layout}" if layout else "")
        raise type(error)(f"{where}: {error.args[0]}") from None


def _row(each: ToScale, found: MeasuredStep, rates: MachineRates, rows: Sequence[ScaledStep]) -> ScaledStep:
    """Return a row. rows: those before it; the first of the same layout has efficiency 1."""
    config = each.plan.config
    tokens = config.batch.global_ * config.data.sequence
    predicted = predicted_step(each.plan, rates)
    speed, predicted_speed = tokens / found.seconds, tokens / predicted.seconds
    first = next((row for row in rows if row.typed == each.typed), None)
    return ScaledStep(
        each.typed, each.ranks, layout_of(config, rates).describe(), config.batch.global_,
        found.seconds, predicted.seconds, speed, predicted_speed,
        speed / each.ranks / (first.tokens_per_s / first.ranks) if first else 1.0,
        predicted_speed / each.ranks / (first.predicted_tokens_per_s / first.ranks) if first else 1.0,
        found.waiting_s, predicted.bubble + predicted.sent,
    )  # fmt: skip


# ---------------------------------------------------------------- what is said


def _as_text(rows: Sequence[ScaledStep], asked: SweepRequest, world: World) -> str:
    title = (
        f"{asked.scaling} scaling over the first ranks of {world.size}; a step is the median of "
        f"{asked.steps}, predicted by the figures of {machine_name(asked)}; waiting is for "
        "messages that nothing hides, and for the pipeline:"
    )
    return f"{title}\n{tabled(COLUMNS, rows)}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


COLUMNS = (
    Column("ranks", "ranks"), Column("batch", "batch"),
    Column("measured s", "measured_s", number), Column("predicted s", "predicted_s", number),
    Column("tokens/s", "tokens_per_s", thousands),
    Column("predicted tokens/s", "predicted_tokens_per_s", thousands),
    Column("efficiency", "efficiency", _hundredths),
    Column("predicted efficiency", "predicted_efficiency", _hundredths),
    Column("waiting ms", "waiting_s", _milliseconds),
    Column("predicted waiting ms", "predicted_waiting_s", _milliseconds), Column("layout", "layout"),
)  # fmt: skip


def _picture(rows: Sequence[ScaledStep], asked: SweepRequest, world: World) -> bytes:
    from mpitrain.commands.plan.sweep_picture import scaling_curves  # matplotlib

    curves: dict[str, list[ScaledStep]] = {}
    for row in rows:
        curves.setdefault(row.typed, []).append(row)
    return scaling_curves(curves, asked.scaling or "")
