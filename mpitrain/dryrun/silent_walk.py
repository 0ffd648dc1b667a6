"""A rank that computes nothing walks its program, with the operations that a rehearsal wrote down.

    instruction  the next one of the program of the plan; what computes takes the time it is given,
                 asleep (dryrun/asleep.py)
    operation    a real one, over the communicators that training has, its messages checked as they
                 come (dryrun/signed.py)
    wait         where the actor would wait

No torch.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from time import sleep

from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.links import Links
from mpitrain.comm.mesh import Mesh
from mpitrain.comm.prediction import predicted
from mpitrain.comm.standins.recipe import At, Event, Start
from mpitrain.dryrun.signed import Sender, Signed
from mpitrain.errors import MessageError
from mpitrain.plan.plan import Plan
from mpitrain.schedules.actions import Action


@dataclass
class AxisTally:
    """What was started on an axis, or sent over it."""

    operations: int = 0
    messages: int = 0
    num_bytes: int = 0


class DryRun:
    """One rank.

    predicted: what its recipe says that it sends, by axis.
    headers: how many were right; short: of parts without one.
    recipe: of a step. share: of the length of each message. seconds: of an instruction, asleep.
    """

    def __init__(self, plan: Plan, mesh: Mesh, recipe: list[Event], place: RankStatus | None = None,
        share: float = 1.0,
        seconds: Callable[[Action], float] = lambda action: 0.0,
    ):  # fmt: skip
        self.mesh = mesh
        self.place = place or RankStatus()
        self.progress = mesh.progress
        self._program = plan.training.ranks[mesh["pp"].rank]
        self._seconds = seconds
        self._recipe = [_shortened(event, share, mesh) for event in recipe]
        table = plan.table
        links = Links(
            mesh["links"], table.num_stages, table.num_microbatches, synchronous=plan.config.comm.synchronous
        )
        self._sender = Sender(mesh, plan.axes.of(mesh.rank), links, _counts(self._recipe, mesh))
        # by its number in the step; what is waited for goes, with its buffers
        self._started: dict[int, Signed] = {}
        self.predicted: dict[str, AxisTally] = defaultdict(AxisTally)
        self.headers = self.short = 0

    def step(self, step: int) -> None:
        """Walk the program once. Collective over all ranks.

        Raises MessageError, if another message came than was due, and HangError.
        """
        before = self._started
        num_started = sum(isinstance(event, Start) for event in self._recipe)
        self._started = {}
        numbers = count()
        self._sender.begin()
        for event in self._recipe:
            if isinstance(event, At):
                self._come_to(event, step)
            elif isinstance(event, Start):
                self._started[next(numbers)] = self._start(event)
            elif event.number >= 0:
                self._wait(self._started.pop(event.number))
            elif before:
                self._wait(before.pop(num_started + event.number))

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        for signed in self._started.values():
            self._wait(signed)
        self.progress.drain()

    def _come_to(self, event: At, step: int) -> None:
        self.place.moved(step, event.position, event.instruction)
        self.progress.poll()
        action = self._program[event.position]
        if str(action) != event.instruction:
            raise MessageError(
                f"position {event.position} of the program: found {action}, the recipe has "
                f"{event.instruction}"
            )
        both = self._program[event.position + 1 :][:2] if action.kind == "PAIR" else [action]
        if seconds := sum(map(self._seconds, both)):
            sleep(seconds)

    def _start(self, event: Start) -> Signed:
        signed = self._sender.start(event)
        tally = self.predicted[event.axis]
        num_messages, num_bytes = predicted(event.operation, event.num_bytes, signed.axis, signed.x)
        tally.operations += 1
        tally.messages += num_messages
        tally.num_bytes += num_bytes
        return signed

    def _wait(self, signed: Signed) -> None:
        headers, short = signed.wait()
        self.headers += headers
        self.short += short
        self._sender.give_back(signed)


def _shortened(event: Event, share: float, mesh: Mesh) -> Event:
    """Return an event with `share` of its length, but room for a header of each rank for each other."""
    if not isinstance(event, Start) or share == 1:
        return event
    size = mesh[event.axis].size
    least = min(event.num_bytes, 8 * size * size)
    return event._replace(num_bytes=max(least, int(event.num_bytes * share) // (8 * size) * 8 * size))


def _counts(recipe: Iterable[Event], mesh: Mesh) -> dict[str, list[list[int]]]:
    """Return, by axis, what each rank sends in each all_to_all_v. Collective over these axes."""
    mine = defaultdict(list)
    for event in recipe:
        if isinstance(event, Start) and event.operation == "all_to_all_v":
            mine[event.axis].append(event.num_bytes)
    return {name: list(zip(*mesh[name].all_gather_objects(counts))) for name, counts in mine.items()}
