"""Finding the newest checkpoint that is whole.

    latest = open_latest(folder, warn=...)      one rank: verifies, refuses what is torn, and broadcasts latest.step
    mine = open_step(folder, step)              the others: verified once is enough
"""

import warnings
from collections.abc import Callable
from pathlib import Path

from mpitrain.checkpoint.folders import find
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.verify import check_sizes, verify
from mpitrain.errors import CheckpointError


def steps(folder: Path) -> list[int]:
    """Return the committed steps, oldest first. Nothing is said about whether they can be used."""
    return list(find(folder))


def open_step(folder: Path, step: int) -> Checkpoint:
    """Open one step, of which only the index is verified; its shards must have the right sizes. Raises CheckpointError."""
    committed = find(folder)
    if step not in committed:
        found = ", ".join(map(str, committed)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}, found: {found}; use one of these")
    checkpoint = Checkpoint(committed[step])
    try:
        check_sizes(checkpoint)
    except CheckpointError:
        checkpoint.close()
        raise
    return checkpoint


def open_latest(folder: Path, check_digests: bool = True, warn: Callable[[str], object] = warnings.warn) -> Checkpoint | None:
    """Open the newest step that is whole, or return None if nothing was committed in `folder` yet. For one rank.

    Steps that are torn or altered are passed over, and `warn` is told why and which one is used instead.
    Raises CheckpointError when there are steps but none can be used: a run never starts anew over them by mistake.
    """
    refused = []
    for step, path in reversed(find(folder).items()):
        try:
            if check_digests:
                verify(path)
            checkpoint = open_step(folder, step)
        except CheckpointError as error:
            refused += error.args
            warn(refused[-1])
            continue
        if refused:
            warn(f"using {path.name}")
        return checkpoint
    if refused:
        raise CheckpointError(f"{folder}: no checkpoint can be used: {'; '.join(refused)}; restore one from a copy, or change run.dir")
    return None
