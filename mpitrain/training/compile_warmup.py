"""A step before the first, which changes nothing: no step's time and limit has what it compiles."""

from collections.abc import Iterator
from contextlib import contextmanager

from mpitrain.actor.actor import Actor
from mpitrain.actor.step_work import StepRequests
from mpitrain.cluster.limit import FIRST_S
from mpitrain.cluster.status_board import BUSY
from mpitrain.parallel.microbatch import Microbatch


def warm_up(actor: Actor, step: int, microbatches: list[Microbatch]) -> None:
    """Walk through a validation and through step `step`, but for its update. Collective over all ranks."""
    scale = actor.loss_scale.state
    with _patiently(actor), actor.place.at("build", "compiling", BUSY):
        actor.evaluate(step, microbatches)
        actor.run_step(step, microbatches, 0.0, asked=StepRequests(skip_update=lambda loss: True))
    actor.loss_scale.state = scale


@contextmanager
def _patiently(actor: Actor) -> Iterator[None]:
    """Let waits last as long as other ranks may compile."""
    place = actor.place
    progress = actor.progress
    limit_s = place.limit_s
    timeout_s = progress.timeout_s
    place.name(place.who, max(limit_s, FIRST_S))
    progress.timeout_s = max(timeout_s, FIRST_S)
    yield
    place.name(place.who, limit_s)
    progress.timeout_s = timeout_s
