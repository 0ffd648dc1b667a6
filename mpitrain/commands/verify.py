"""`mpitrain verify`: is a layout right?"""

from collections.abc import Callable

from mpitrain.cluster import code_identity
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.status_board import BUSY
from mpitrain.commands.inspect import planned
from mpitrain.config import Config, Parallel, digest
from mpitrain.errors import DONE, FAILED
from mpitrain.training.checks.one_rank import STEPS, TOLERANCE, WrongTensor, verify
from mpitrain.training.machine import compiler
from mpitrain.training.run_plan import ranks_of


def main(path: str | None, overrides: tuple[str, ...], guard: Guard, say: Callable[[str], None]) -> int:
    """Verify the layout of a configuration, say on rank 0 what was found, and return the exit code.

    Collective over all ranks.
    """
    world = guard.connect(may_be_alone=True)
    config = world.on_every_rank(
        "checking the configuration", lambda: planned(path, overrides, ranks_of(world))
    ).config
    world.require_same({"the configuration": digest(config), **code_identity.code()})
    if config.run.compile is True:
        world.on_every_rank("looking for a compiler", lambda: compiler.require(None))
    guard.place.enter("step", "training the small model in this layout and on one rank", BUSY)
    differences = verify(config, world)
    if world.rank == 0:
        say(report(config, differences))
    return FAILED if differences else DONE


def report(config: Config, differences: list[WrongTensor]) -> str:
    """Return what was found, in words."""
    parallel = config.parallel
    experts = f", ep {parallel.ep} x etp {parallel.etp}" if config.experts.count else ""
    layout = (
        f"tp {parallel.tp} x cp {parallel.cp} x dp {parallel.dp} x pp {parallel.pp}{experts}, "
        f"{config.pipeline.schedule}{_left_out(config)}"
    )
    if not differences:
        return (
            f"verified: {layout}: losses, norms, gradients and weights of {STEPS} steps equal one "
            f"rank's to {TOLERANCE:.0e}"
        )
    first = differences[0]
    same = [d for d in differences if d.order == first.order]
    where = ", ".join(_where([d.coordinates for d in same], parallel)) or "every rank"
    error = max(d.error for d in same)
    return (
        f"wrong: {layout}: {first.tensor} differs from one rank's by {error:.1e}, after {first.instruction}, "
        f"on {where}"
    )


def _left_out(config: Config) -> str:
    """Say which settings the small model doesn't have."""
    experts = config.experts
    there = {
        "pipeline.stages": config.pipeline.stages,
        "precision.reduce": config.precision.reduce != "same",
        "experts.capacity": experts.capacity,
        "experts.wire": experts.wire,
        "experts.replay": experts.replay,
    }
    names = ", ".join(name for name, value in there.items() if value)
    return f" (without {names})" if names else ""


def _where(wrong: list[dict[str, int]], parallel: Parallel) -> list[str]:
    """Name the coordinates at which something is wrong, of the axes along which it isn't wrong everywhere."""
    places = []
    for axis in ("pp", "dp", "cp", "tp"):
        at = sorted({coordinates[axis] for coordinates in wrong})
        if len(at) < getattr(parallel, axis):
            places.append(f"{axis} {' '.join(map(str, at))}")
    return places
