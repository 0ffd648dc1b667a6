"""Which step of which folder a path means: a run directory, its checkpoints, or the folder of one step."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.folders import find, find_one, step_of
from mpitrain.checkpoint.load import open_step
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.retention import best_step
from mpitrain.cluster.team import Team
from mpitrain.config_hints import RUN_DIRECTORY, recognised
from mpitrain.errors import CheckpointError
from mpitrain.inputs import kind_of, listed, shown

CHECKPOINTS = "checkpoints"
GIVE = "give a run directory, its checkpoints, or one of them"


class Steps(NamedTuple):
    """folder: of the checkpoints.

    chosen: the step that was meant, None for any.
    committed: that, or all that are there, oldest first.
    """

    folder: Path
    chosen: int | None
    committed: tuple[int, ...]

    @property
    def newest(self) -> int:
        """The one that was meant, or the newest."""
        return self.committed[-1]

    def gone(self, step: int) -> bool:
        """Tell whether a step was removed meanwhile, as a run does that keeps few."""
        return find_one(self.folder, step) is None

    def path(self, step: int) -> Path:
        """Return the folder of a step. Raises CheckpointError if it was removed meanwhile."""
        path = find_one(self.folder, step)
        if path is None:
            raise CheckpointError(f"step {step}: removed meanwhile")
        return path

    def open(self, step: int) -> Checkpoint:
        """Open a step; its index is verified. Raises CheckpointError."""
        return open_step(self.folder, step)


def steps_at(given: str, step: int | str | None = None) -> Steps:
    """Return what a path means; `step` picks one, or best_step(). Raises CheckpointError if there is none."""
    path = Path(given)
    holds_checkpoints = _holds_checkpoints(given, path)
    absolute = path.absolute()
    of_name = step_of(absolute)
    folder = path / CHECKPOINTS if holds_checkpoints else path
    if isinstance(step, str):
        step = best_step(folder, step)
    if of_name is not None and step in (None, of_name):
        committed = find(absolute.parent)
        if of_name in committed and committed[of_name].name != absolute.name:
            raise CheckpointError(
                f"{shown(given)} is what was replaced or removed; step {of_name} is "
                f"{shown(committed[of_name])}"
            )
        return _chosen(given, absolute.parent, committed, of_name)
    return _chosen(given, folder, find(folder), step)


def _holds_checkpoints(given: str, path: Path) -> bool:
    """Return whether what is there is a run directory. Raises CheckpointError if nothing is."""
    try:
        kind = kind_of(path)
        inside = kind_of(path / CHECKPOINTS)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{shown(given)}: {reason(error)}; {GIVE}") from None
    if kind is None:
        raise CheckpointError(f"{shown(given)}: no such file or directory; {GIVE}")
    return inside == "a folder"


def _chosen(given: str, folder: Path, committed: Mapping[int, Path], step: int | None) -> Steps:
    """Return a step of a folder, or all. Raises CheckpointError if it isn't committed, or none is."""
    if not committed or (step is not None and step not in committed):
        place = f"of step {step}, found {listed(committed) or 'none'}" if step is not None else "there"
        if other := recognised(Path(given), own=False):
            place += f", it is {other}" * (other != RUN_DIRECTORY)
        raise CheckpointError(f"{shown(given)}: no checkpoint {place}; {GIVE}")
    return Steps(folder, step, tuple(committed) if step is None else (step,))


def same_everywhere(team: Team, checkpoint: Checkpoint | None) -> None:
    """Raise CheckpointError, on all ranks, unless all that could open a checkpoint have opened the same one.

    Collective.
    """
    mine = None if checkpoint is None else (checkpoint.step, checkpoint.digest)
    names = sorted({name for name in team.all_gather("which checkpoint they see", mine) if name is not None})

    def require() -> None:
        if len(names) > 1:
            steps = ", ".join(f"step {step} with root digest {digest}" for step, digest in names[:4])
            raise CheckpointError(
                f"ranks see different checkpoints: {steps}; give a folder that all of them share"
            )

    team.on_every_rank("comparing what they see", require)
