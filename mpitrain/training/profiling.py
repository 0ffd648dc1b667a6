"""run.profile: torch's profiler on some steps of some ranks, as a table and as profile.json."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from mpitrain.actor.actor import Actor
from mpitrain.actor.profile_events import OUTSIDE, Cost, Operation, RankProfile, merged, total_costs
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.comm.meters.clock_offset import offset_to_first_rank
from mpitrain.errors import counted
from mpitrain.inputs import write_regular
from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.settings.profile_request import ProfileRequest
from mpitrain.training.side_files import written

MOST_OPERATIONS = 10  # of the table
WIDEST = 60  # letters of an operation's name: those of kernels have hundreds
HEADER = ("operation", "instruction", "calls", "ms a step", "share")


class Profiling:
    """What run.profile asks for, on all ranks. say: takes lines on all ranks; rank 0 says them."""

    def __init__(self, actor: Actor, world: World, rundir: RunDir, say: Callable[[str], None]):
        self._request = ProfileRequest.read(actor.config.run.profile)
        self._profiler = actor.profiler
        self._mesh = actor.mesh
        self._world = world
        self._path = rundir.profile
        self._place = actor.place
        self._say = say
        self._steps = range(0)  # that are to be profiled
        self._ranks = self._request.ranks if self._request else ()

    def choose(self, done: int) -> None:
        """Choose the steps that are profiled, of those after step `done`."""
        if self._request is None:
            return
        first, last = self._request.steps[0], self._request.steps[-1]
        self._steps = range(max(first, done + 1), last + 1)
        if not self._steps:
            self._say(f"run.profile: the run resumes after step {done}, and step {last} isn't profiled again")
        elif self._world.rank in self._ranks:
            with self._place.at("step", "loading torch's profiler", BUSY):
                self._profiler.warm_up()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile a step, if it is to be."""
        if step not in self._steps or step == self._steps[0]:
            self._profiler.drop()  # a rollback led after the first one
        if step in self._steps and self._world.rank in self._ranks and not self._profiler.running:
            self._profiler.start()
        with self._profiler.step(step):
            yield

    def end(self, step: int) -> None:
        """Write what is complete after a step. Collective over all ranks."""
        if step not in self._steps[-1:]:
            return
        self._steps = range(0)  # complete: what a rollback computes again isn't profiled again
        with self._place.waiting("for all ranks: their part of the profile"):
            offset_s = offset_to_first_rank(self._world)
        gathered = self._world.gather("their part of the profile", self._part(offset_s))
        if gathered is None:
            return
        ranks = {rank: part for rank, part in enumerate(gathered) if isinstance(part, RankProfile)}
        if ranks:
            self._say(table(ranks))
            said = f"profiled: {self._path} opens in https://ui.perfetto.dev"
            content = json.dumps(merged(ranks), separators=(",", ":")).encode()
            self._say(written(self._place, self._path, partial(write_regular, content=content), said))
        for failure in gathered:
            if isinstance(failure, str):
                self._say(failure)

    def close(self) -> None:
        """Drop a profile that isn't complete: the run is over."""
        self._profiler.drop()
        if self._steps:
            self._say(f"run.profile: the run left before step {self._steps[-1]}, and nothing is written")

    def _part(self, offset_s: float) -> RankProfile | str | None:
        """Return this rank's part, or why it isn't there; None if it isn't asked for."""
        if not self._profiler.running:
            return None
        replica = self._mesh["data"].rank * self._mesh["tp"].size + self._mesh["tp"].rank
        with self._place.at("step", "reading what torch's profiler recorded", BUSY):
            try:
                return self._profiler.stop(str(self._mesh), replica, offset_s)
            except OSError as error:
                return f"{self._mesh}: its profile can't be read: {error.strerror}"


def table(ranks: dict[int, RankProfile]) -> str:
    """Return the operations that took longest, by the instructions they are part of."""
    costs = total_costs(ranks.values())
    num_steps = next(iter(ranks.values())).num_steps
    per = num_steps * len(ranks)
    whole_us = sum(cost.self_us for cost in costs.values())
    by_cost = sorted(costs.items(), key=lambda item: item[1].self_us, reverse=True)
    outside = [(operation, cost) for operation, cost in by_cost if operation.name == OUTSIDE]
    operations = [item for item in by_cost if item[0].name != OUTSIDE][:MOST_OPERATIONS]
    of_ranks = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
    lines = [
        "operations that took longest by themselves, per step and rank (mean of "
        f"{counted(num_steps, 'steps')} of {of_ranks}):",
        aligned([HEADER, *(_row(*item, per, whole_us) for item in operations)]),
    ]
    if outside:
        times = (f"{operation.kind} {cost.self_us / per / 1e3:.2f}" for operation, cost in outside)
        lines.append(f"  {OUTSIDE} (Python, MPI, waiting), ms: {', '.join(list(times)[:MOST_OPERATIONS])}")
    idle_us = Counter[str]()
    for part in ranks.values():
        idle_us.update(part.idle_us)
    if idle_us:
        waits = ", ".join(f"{reason} {spent / per / 1e3:.2f}" for reason, spent in idle_us.most_common())
        lines.append(f"  the GPU is idle, ms, waiting for {waits}")
    return "\n".join(lines)


def _row(operation: Operation, cost: Cost, per: int, whole_us: float) -> tuple[str, ...]:
    name = operation.name
    return (
        name if len(name) <= WIDEST else f"{name[: WIDEST - 3]}...",
        operation.kind,
        f"{cost.calls / per:,.0f}",
        f"{cost.self_us / per / 1e3:.2f}",
        f"{cost.self_us / whole_us:.1%}" if whole_us else "",
    )
