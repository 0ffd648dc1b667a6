"""`mpitrain plan --measure K`: the first K layouts take a few steps on these ranks.

An Actor takes them, of random tokens: nothing is read, saved or validated.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.communicators import build_mesh
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.commands.plan.plan_variants import counts_of as ranks_in
from mpitrain.commands.plan.planner import TOP, PlanAnswer, find_layouts
from mpitrain.commands.requests import PlanRequest
from mpitrain.config import Config
from mpitrain.errors import DONE, ConfigError, counted
from mpitrain.measuring.device import rate_of_products
from mpitrain.parallel.device_clock import clock_of
from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.division.batch_division import sequences_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.step_time.expert_load import CountedLoad, counts_of
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.predict.step_time.tiles import stated
from mpitrain.planner.choice import planned
from mpitrain.training.machine.device_placement import DevicePlacement, place, way_of_messages

STEPS = 5  # that are timed, after one that isn't
TIMEOUT_S = 600.0
LR = 1e-5


class ToMeasure(NamedTuple):
    """A layout, its configuration as the planner completed it, and seconds of a step as predicted."""

    layout: str
    config: Config
    predicted_s: float


def measure(asked: PlanRequest, guard: Guard, say: Callable[[str], None]) -> int:
    """Plan on rank 0, have all ranks take steps, and print both. Collective over all ranks."""
    ranks = 0 if asked.ranks is None else ranks_in(asked.ranks)[0]
    world = guard.connect(may_be_alone=True)
    world.on_every_rank("checking --ranks", lambda: _require_ranks(ranks, world.size))
    count = asked.measure or 0
    asked = replace(asked, top=max(asked.top or TOP, count))
    text, chosen, rates = world.on_first_rank(
        "planning", lambda: _planned_here(find_layouts(asked, world.size, world.node_ranks), count)
    )
    if world.rank == 0:
        say(text)
    rows = [("", "predicted s", "measured s", "measured / predicted", "layout")]
    for number, each in enumerate(chosen, start=1):
        guard.leave_if_asked(world)
        plan = world.on_every_rank(
            f"planning {each.layout}", lambda each=each: planned(each.config, world.size, rates)
        )
        took = measured_step(plan, world, guard).seconds
        ratio = f"{took / each.predicted_s:.2f}"
        rows.append((f"{number}.", f"{each.predicted_s:.3g}", f"{took:.3g}", ratio, each.layout))
    if world.rank == 0:
        title = f"measured on {counted(world.size, 'ranks')}, the median of {STEPS} steps:"
        say(f"\n{title}\n{aligned(rows)}")
    return DONE


def _require_ranks(asked: int, started: int) -> None:
    if asked not in (0, started):
        raise ConfigError(
            f"--ranks {asked} with --measure: found {counted(started, 'ranks')} started; leave --ranks out"
        )


def _planned_here(answer: PlanAnswer, count: int) -> tuple[str, list[ToMeasure], MachineRates]:
    expected = [runnable.expected(answer.rates) for runnable in answer.chosen[:count]]
    chosen = [ToMeasure(each.layout.describe(), each.config, each.found.seconds) for each in expected]
    return answer.as_text(), chosen, answer.rates


class MeasuredStep(NamedTuple):
    """A step: its seconds, of the slowest rank, and how long the rank that waited least stood still.

    Both of so many steps: the median, and the mean. waiting_s: for messages of every axis, and of
    pp for the schedule's bubble. products: FLOP/s of the slowest rank's, before and after the steps.
    expert_load: of the step that isn't timed; None without experts.
    """

    seconds: float
    waiting_s: float
    products: float
    expert_load: CountedLoad | None

    def speed(self, plan: Plan, rates: MachineRates) -> float | None:
        """Return the products' rate as a share of what a machine's file says, if it says one."""
        kind = _type_of_products(plan)
        if kind not in rates.products:
            return None
        expected = rates.products[kind]
        return self.products / (stated(expected, rates.tiles[kind]) if kind in rates.tiles else expected)


def measured_step(plan: Plan, world: World, guard: Guard, steps: int = STEPS) -> MeasuredStep:
    """Take so many steps, after one that isn't timed. Collective over all ranks of `world`."""
    placement = place(plan, world)
    way = way_of_messages(placement, world, plan.config.comm.device, TIMEOUT_S)
    mesh = build_mesh(plan, world.comm, guard.place, way, placement.use)
    mesh.keep_time(clock_of(placement.device))
    before = rate_of_products(placement.device, _type_of_products(plan))
    seconds, waiting_s, load = _timed(plan, mesh, placement, world, guard, steps)
    mesh.free()
    after = rate_of_products(placement.device, _type_of_products(plan))
    rates = world.all_gather("how fast products are", (before + after) / 2)
    return MeasuredStep(seconds, waiting_s, min(rates), load)


def _type_of_products(plan: Plan) -> str:
    compute = plan.config.precision.compute
    return "bf16" if compute == "fp8" else compute


def _timed(
    plan: Plan, mesh: Mesh, placement: DevicePlacement, world: World, guard: Guard, steps: int
) -> tuple[float, float, CountedLoad | None]:
    """Return what MeasuredStep has of the steps: seconds, waiting_s, expert_load. Collective."""
    clock = clock_of(placement.device)
    with guard.place.at("build", "building the model", BUSY):
        actor = Actor(plan, mesh, placement.device, place=guard.place, compiled=placement.compiled)
    shape = len(sequences_of(plan.config, mesh["dp"].rank)), plan.config.data.sequence + 1
    numbers = torch.Generator().manual_seed(mesh["dp"].rank)
    tokens = torch.randint(0, plan.config.model.vocab, shape, generator=numbers).to(placement.device)
    microbatches = actor.cutter.cut(tokens)
    found = []
    blocked_s = 0.0
    load = None
    actor.compute.recorded = [] if plan.loads else None
    for step in range(1, steps + 2):
        guard.place.enter("step", "between two steps")
        world.barrier("the beginning of a step")
        if step == 2:
            load = _load_of(actor, world)
            actor.compute.recorded = None
            world.barrier("the beginning of a step")
            blocked_s = _blocked_s(mesh)
        begin = clock.mark()
        begin_s = time.perf_counter()
        actor.run_step(step, microbatches, LR)
        actor.settle()
        took = max(clock.seconds(begin, clock.mark()), time.perf_counter() - begin_s)
        found.append(max(world.all_gather("how long a step took", took)))
    waited = min(world.all_gather("how long ranks waited", _blocked_s(mesh) - blocked_s))
    return statistics.median(found[1:]), waited / steps, load


def _load_of(actor: Actor, world: World) -> CountedLoad | None:
    """Return how unevenly the recorded step has loaded experts. Collective over all ranks."""
    if actor.compute.recorded is None:
        return None
    config = actor.config
    count = config.experts.count
    mine = [(name, rows, counts_of(experts, count)) for name, rows, _, experts in actor.compute.recorded]
    counts: dict[str, np.ndarray] = {}
    for name, rows, found in chain.from_iterable(world.all_gather("the loads of experts", mine)):
        of_block = counts.setdefault(name, np.zeros((config.batch.global_, count), np.int64))
        of_block[rows.start : rows.stop] += found
    return CountedLoad(np.stack(list(counts.values())), "as measured")


def _blocked_s(mesh: Mesh) -> float:
    return sum(usage.blocked_s for usage in mesh.usage().values())
