"""Finding the newest checkpoint that is whole.

    latest = open_latest(folder, warn=...)      one rank: verifies, refuses what is torn, and broadcasts latest.step
    mine = open_step(folder, step)              the others: verified once is enough
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MappingProxyType

from mpitrain.checkpoint.folders import find
from mpitrain.checkpoint.reader import Checkpoint, Needs
from mpitrain.checkpoint.verify import check_sizes, verify_data
from mpitrain.errors import CheckpointError

NOTHING: Needs = MappingProxyType({})


def steps(folder: Path) -> list[int]:
    """Return the committed steps, oldest first. Nothing is said about whether they can be used."""
    return list(find(folder))


def open_step(folder: Path, step: int, needs: Needs = NOTHING) -> Checkpoint:
    """Open one step, of which only the index is verified; its shards must have the right sizes. Raises CheckpointError.

    needs: arrays it must have, with these dtypes and shapes.
    """
    committed = find(folder)
    if step not in committed:
        found = ", ".join(map(str, committed)) or "none"
        raise CheckpointError(f"{folder} has no checkpoint of step {step}, found: {found}; use one of these")
    return _opened(committed[step], needs, check_sizes)


def _opened(path: Path, needs: Needs, check: Callable[[Checkpoint], None]) -> Checkpoint:
    checkpoint = Checkpoint(path)
    try:
        checkpoint.require(needs)
        check(checkpoint)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def open_latest(
    folder: Path,
    share: float = 1.0,
    warn: Callable[[str], object] = warnings.warn,
    needs: Needs = NOTHING,
    each: Callable[[str], object] = lambda chunk: None,
) -> Checkpoint | None:
    """Open the newest step that is whole, or return None if nothing was committed in `folder` yet. For one rank.

    Steps that are torn, altered, a stranger's, or without what is needed are passed over: `warn` is told why, and which one is used.
    share: of the chunks of each, taken by chance, that is read and verified; its index and the sizes of its shards are in any case.
    each: called with the name of each chunk that is read.
    Raises CheckpointError when there are steps but none can be used: a run never starts anew over them by mistake.
    """
    refused = []
    for path in reversed(find(folder).values()):
        try:
            checkpoint = _opened(path, needs, partial(verify_data, each=each, share=share))
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
