"""Files that training can do without: trace.json of its instructions, routing.npz of its experts."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from mpitrain.actor.actor import Actor
from mpitrain.actor.trace import gather_events, write_trace
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.status_board import BUSY, RankStatus
from mpitrain.comm.base.world import World
from mpitrain.config import as_override
from mpitrain.errors import counted
from mpitrain.inputs import as_argument
from mpitrain.plan.routing import joined


class SideFiles:
    """What is recorded of some steps, and written when complete. say: called on all ranks."""

    def __init__(self, actor: Actor, world: World, rundir: RunDir, say: Callable[[str], None]):
        self._actor = actor
        self._recorder = actor.recorder
        self._world = world
        self._rundir = rundir
        self._place = actor.place
        self._say = say
        self._steps_of_routing = range(0)
        self._routing = dict[int, list]()

    def choose(self, done: int, last: int, traced: int, routed: int) -> None:
        """Choose the steps that are recorded, of those after step `done`. last: of the run."""
        first = min(done + 2, last)  # the first step is never typical
        self._recorder.steps = range(first, min(first + traced, last + 1))
        self._steps_of_routing = range(done + 1, min(done + routed, last) + 1)

    def begin(self, step: int) -> None:
        """Have the routing of a step recorded, if it is to be."""
        self._actor.compute.recorded = [] if step in self._steps_of_routing else None

    def end(self, step: int) -> None:
        """Take over what was recorded, and write what is complete. Collective over all ranks."""
        if step in self._steps_of_routing:
            self._take_routing(step)
        if step in self._recorder.steps[-1:]:
            self._write_trace()
            # complete: what a rollback computes again isn't traced again
            self._recorder.steps = range(0)

    def _take_routing(self, step: int) -> None:
        """Gather where the tokens of a step went, over what a rollback has undone."""
        routes_of_ranks = self._world.all_gather("the routing of a step", self._actor.compute.recorded)
        self._routing[step] = [routes for part in routes_of_ranks for routes in part]
        if step == self._steps_of_routing[-1] and self._world.rank == 0:
            path = self._rundir.routing
            replayed = as_override("experts.replay", str(path))
            message = f"recorded the routing of steps {min(self._routing)} to {step}: --set {replayed}"
            write = joined(self._actor.config, self._routing).write
            self._say(written(self._place, path, write, message))

    def _write_trace(self) -> None:
        mesh = self._actor.mesh
        with self._place.waiting("for all ranks: their part of the trace"):
            events = gather_events(self._recorder, mesh, self._world)
        if events is None:
            return
        path = self._rundir.trace
        steps = counted(len(self._recorder.steps), "steps")
        message = f"traced {steps}: mpitrain schedule compare --trace {as_argument(path)}"
        table, replicas = self._actor.table, mesh["dp"].size
        works = [stage.work for stage in self._actor.plan.stages]
        write = partial(write_trace, events_of_ranks=events, table=table, num_replicas=replicas, works=works)
        self._say(written(self._place, path, write, message))


def written(place: RankStatus, path: Path, write: Callable[[Path], None], message: str) -> str:
    """Write a file; return `message`, or why it isn't there."""
    with place.at("step", f"writing {path}", BUSY):
        try:
            write(path)
        except OSError as error:
            message = f"{path} can't be written: {error.strerror}"
    return message
