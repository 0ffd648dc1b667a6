"""`mpitrain run --dry-run`: a layout on all its ranks, with real communicators and real messages,
and nothing computed.

    start          every rank reads the configuration and joins MPI; they are compared
    recipes        a process beside rank 0 rehearses each rank (actor/rehearsal.py): the only one that
                   loads torch
    communicators  those of training
    steps          dryrun/silent_walk.py

512 ranks fit on one host: none of them loads torch, and no run directory, corpus or weight is
touched.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from mpitrain.actor.communicators import build_mesh
from mpitrain.cluster.allocation import age_s
from mpitrain.cluster.code_identity import code
from mpitrain.cluster.crowding import many
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.launch import num_ranks_here, rank_of_launcher
from mpitrain.cluster.limit import Limit
from mpitrain.cluster.status_board import BUSY, WAITING
from mpitrain.comm.base import library
from mpitrain.comm.base.world import World
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.meters.account import AxisUsage
from mpitrain.comm.standins.recipe import Event, decoded
from mpitrain.config import Config, LoadedConfig
from mpitrain.data.tokenizer import Vocabulary, tokenizer_of
from mpitrain.dryrun.asleep import AWAKE, Asleep, at_rate
from mpitrain.dryrun.recipes import Rehearsals
from mpitrain.dryrun.silent_walk import AxisTally, DryRun
from mpitrain.errors import DONE, InputError, MeshError, MessageError, counted
from mpitrain.model.families.catalog import plan_for
from mpitrain.plan.declared.formatting import aligned, megabytes, thousands
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.training.agreement import (
    attempt,
    loaded,
    require_no_spares,
    require_same_configuration,
    require_time,
    watch_time,
)
from mpitrain.training.run_plan import agreed_layout, beginning, judged_advice, ranks_of
from mpitrain.training.tokenizing import OneTokenizer

NOTHING = "a dry run saves nothing"


@dataclass(frozen=True)
class DryRunOptions:
    """share: of the length of each message.

    tflops, machine: the rate of computations, or the machine that predicts their time. Both None:
    they take none.
    """

    steps: int = 3
    share: float = 1.0
    tflops: float | None = None
    machine: str | None = None


class Measured(NamedTuple):
    """What one rank has measured.

    resident, own: bytes of memory; of its own are an n-th of what n processes share.
    headers: of messages, that were right. short: parts of messages without one.
    sent: by axis, in all steps.
    """

    steps_s: list[float]
    resident: int
    own: int
    headers: int
    short: int
    sent: dict[str, AxisTally]


def run(
    path: str | None,
    overrides: tuple[str, ...],
    options: DryRunOptions,
    guard: Guard,
    say: Callable[[str], None],
) -> int:
    """Run the steps of a layout dry; rank 0 tells each phase when it is over. Collective over all ranks.

    Raises InputError, alike on all ranks, for a configuration that can't work, StoppedEarly, too,
    when one has to leave, and MessageError if another message came than was due.
    """
    guard.place.enter("start", "reading the configuration", BUSY)
    rehearsals = Rehearsals()
    read = attempt(path, overrides)
    world = _connected(read, guard, say)
    start_s = age_s()
    plan = _agreed_plan(read, world, rehearsals, guard, say)
    asleep = world.on_every_rank("predicting computations", lambda: _asleep(plan, options, world))
    phases = Phases(plan, world, options, asleep, guard, say)
    phases.report_start(start_s)
    recipe = phases.rehearse(rehearsals)
    mesh = phases.build_mesh()
    phases.walk(mesh, recipe)
    with guard.place.at("end", "freeing the communicators", WAITING):
        mesh.free()
    return DONE


def _connected(read: LoadedConfig | InputError, guard: Guard, say: Callable[[str], None]) -> World:
    """Join MPI, under the limits of the configuration if there is one."""
    if isinstance(read, LoadedConfig):
        guard.place.name(guard.place.who, Limit(read.config.comm.timeout_s).seconds)
        if rank_of_launcher()[0] == 0:
            watch_time(read.config, guard, say)
    if rank_of_launcher()[0] == 0 and (hint := _start_with_less()):
        say(hint)
    return guard.connect()


def _start_with_less() -> str:
    """Return how to start so many ranks with less memory, before MPI takes it; "" without an MPI."""
    with suppress(MeshError):
        return many(library.vendor(), num_ranks_here(), os.cpu_count() or 1)
    return ""


def _agreed_plan(
    read: LoadedConfig | InputError,
    world: World,
    rehearsals: Rehearsals,
    guard: Guard,
    say: Callable[[str], None],
) -> Plan:
    """Return the plan of all ranks, and let the rehearsals of it begin. Collective over all ranks.

    Raises InputError or MeshError, alike on all ranks, also where configuration or code differ.
    """
    guard.place.enter("start", "checking the configuration", BUSY)
    given = world.on_every_rank("checking the configuration", lambda: _checked(read))
    data = given.config.data
    vocabulary = OneTokenizer(world, data).read(lambda: tokenizer_of(data))
    config, said = agreed_layout(given, world, vocabulary, look_at_gpus=False)
    if world.rank == 0:
        for line in said:
            say(line)
    plan = world.on_every_rank("checking the configuration", lambda: _plan(config, world, vocabulary))
    advice = judged_advice(config, plan, world, vocabulary)
    if world.rank == 0:
        for line in advice:
            say(line)
        rehearsals.begin(plan.config)
    require_same_configuration(world, plan.config)
    # hundreds of ranks would take a while
    world.require_same(world.on_first_of_node("digesting the code", code))
    return plan


@dataclass(frozen=True)
class Phases:
    """What follows the configuration, phase by phase; each is collective over all ranks.

    After the start, the communicators and each step all ranks leave if one was asked to.
    """

    plan: Plan
    world: World
    options: DryRunOptions
    asleep: Asleep
    guard: Guard
    say: Callable[[str], None]

    def report_start(self, start_s: float) -> None:
        """Say what is run, and how long the slowest rank took to join MPI."""
        times = self.world.gather("how long they took to start", start_s)
        if times is not None:
            self.say(_title(self.plan, self.world, self.options, self.asleep))
            self.say(f"start          {max(times):.1f} s, to the last process in MPI")
        self.guard.leave_if_asked(self.world, NOTHING)

    def rehearse(self, rehearsals: Rehearsals) -> list[Event]:
        """Return this rank's recipe, when all are rehearsed."""
        place = self.guard.place
        place.enter("build", "rehearsing the ranks", BUSY)
        begin = time.monotonic()
        text = self.world.scatter("rehearsing the ranks", lambda: rehearsals.recipes(self.world.size, place))
        recipe = decoded(msgspec.json.decode(text))
        self._report("recipes", time.monotonic() - begin)
        return recipe

    def build_mesh(self) -> Mesh:
        """Make the communicators of training. The caller frees them."""
        place = self.guard.place
        begin = time.monotonic()
        with place.at("build", "making the communicators", WAITING):
            mesh = build_mesh(self.plan, self.world.comm, place)
        place.name(f"{mesh} on {os.uname().nodename}", Limit(self.plan.config.comm.timeout_s).seconds)
        self._report("communicators", time.monotonic() - begin)
        self.guard.leave_if_asked(self.world, NOTHING)
        return mesh

    def walk(self, mesh: Mesh, recipe: list[Event]) -> None:
        """Run the steps, and say what the ranks have measured.

        Raises MessageError unless what was sent is what the recipe has.
        """
        options = self.options
        walk = DryRun(self.plan, mesh, recipe, self.guard.place, options.share, self.asleep.seconds)
        steps_s = []
        for step in range(1, options.steps + 1):
            steps_s.append(_timed_step(walk, step, self.world))
            self._report(f"step {step}", steps_s[-1])
            self.guard.leave_if_asked(self.world, NOTHING)
        walk.finish()
        _require_predicted(walk, mesh.usage())
        self.guard.place.enter("end", "printing the summary")
        measured = Measured(steps_s, *_memory(), walk.headers, walk.short, walk.predicted)
        every = self.world.gather("what was measured", measured)
        if every is not None:
            self.say(report(options, every))

    def _report(self, what: str, seconds: float) -> None:
        """Say how long the slowest rank took."""
        every = self.world.gather("how long it took", seconds)
        if every is not None:
            self.say(f"{what:15}{max(every):.3g} s")


def _checked(read: LoadedConfig | InputError) -> LoadedConfig:
    asked = loaded(read)
    require_time(asked.config)
    require_no_spares(asked.config)
    return beginning(asked)[0]


def _plan(config: Config, world: World, vocabulary: Vocabulary) -> Plan:
    plan = plan_for(config, ranks_of(world), vocabulary)
    if profile := ProfileRequest.read(plan.config.run.profile):
        profile.require(world.size, plan.config.run.steps)
    plan.training  # noqa: B018  # proved here, where trouble is still an InputError of all ranks
    return plan


def _asleep(plan: Plan, options: DryRunOptions, world: World) -> Asleep:
    """Return how long instructions take. Raises ConfigError where that can't be known."""
    if options.machine is not None:
        # with it comes what predicts a step, a megabyte
        from mpitrain.dryrun.asleep_on_machine import on_machine

        return on_machine(plan, options.machine, ranks_of(world).largest_node)
    return AWAKE if options.tflops is None else at_rate(plan, options.tflops)


def _timed_step(walk: DryRun, step: int, world: World) -> float:
    """Run a step that all ranks begin together, and return its time on this rank."""
    world.barrier(f"to begin step {step}")
    walk.place.enter("step", f"step {step}")
    begin = time.perf_counter()
    walk.step(step)
    return time.perf_counter() - begin


def _require_predicted(walk: DryRun, usage: dict[str, AxisUsage]) -> None:
    """Raise MessageError unless what was counted where messages are posted is the recipe's."""
    for name, wanted in walk.predicted.items():
        measured = AxisTally(usage[name].calls, usage[name].messages, usage[name].num_bytes)
        if measured != wanted:
            raise MessageError(f"axis {name}: counted {measured}, the recipe has {wanted}")


def _memory() -> tuple[int, int]:
    """Return the bytes of this process in memory, and its share of them, as in Measured."""
    lines = map(str.split, Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    num_bytes = {name: int(size) * 1024 for name, size, *_ in lines}
    return num_bytes["Rss:"], num_bytes["Pss:"]


# ---------------------------------------------------------------- what rank 0 says


def _title(plan: Plan, world: World, options: DryRunOptions, asleep: Asleep) -> str:
    length = "full length" if options.share == 1 else f"{options.share:g} of their length"
    each = counted(plan.num_microbatches, "microbatches")
    if not plan.division.is_even:
        each = f"{plan.division.numbers} microbatches"
    layout = f"{plan.axes.grid}; {plan.config.pipeline.schedule}, {each} a rank"
    where = f"{counted(world.size, 'ranks')} on {counted(world.num_nodes, 'nodes')}"
    title = f"dry run of {where}, {layout}; messages of {length}, {asleep.words}"
    return "\n".join([title, *(f"{plan.table.name}: {note}" for note in plan.table.notes)])


def report(options: DryRunOptions, every: list[Measured]) -> str:
    """Return what the ranks have measured, as text."""
    steps = [max(times) for times in zip(*(result.steps_s for result in every))]
    resident, worst = max((result.resident, -rank) for rank, result in enumerate(every))
    headers = sum(result.headers for result in every)
    short = sum(result.short for result in every)
    own = sum(result.own for result in every) / 1e9
    lines = {
        "step": f"{sorted(steps)[len(steps) // 2]:.3g} s, median of the slowest rank",
        "memory": f"{resident / 1e6:.0f} MB resident at most (rank {-worst}); {own:.2f} GB of all ranks",
        "headers": f"{headers:,} right; {short:,} parts of messages too short for one",
    }
    traffic = aligned(_traffic(options.steps, every))
    said = [f"{name:15}{text}" for name, text in lines.items()]
    return "\n".join([*said, "sent per step by all ranks, predicted and counted:", traffic])


def _traffic(num_steps: int, every: list[Measured]) -> list[tuple[str, ...]]:
    forms = {"operations": thousands, "messages": thousands, "num_bytes": megabytes}
    by_axis: dict[str, Counter[str]] = defaultdict(Counter)
    for result in every:
        for name, tally in result.sent.items():
            by_axis[name].update(asdict(tally))
    whole = sum(by_axis.values(), Counter())
    totals = {**by_axis, "all": whole}
    rows = [("axis", "operations", "messages", "MB")]
    for name, total in totals.items():
        rows.append((name, *(form(total[key] / num_steps) for key, form in forms.items())))
    return rows
