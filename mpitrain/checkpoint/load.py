"""Finding the newest checkpoint that is whole.

latest = open_latest(folder, warn=...)  one rank: verifies, refuses what is torn
newest_of(folder, steps, judge, warn)   all ranks: each judges by verified() a part of the same
                                        step, and hears of the others
mine = open_step(folder, step)          then all: verified once is enough
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from mpitrain.checkpoint.folders import find, find_one
from mpitrain.checkpoint.reader import Checkpoint, Needs
from mpitrain.checkpoint.verify import VerifiedShare, check_sizes, verify_data
from mpitrain.errors import CheckpointError
from mpitrain.inputs import closed_on_error, listed, shown

MOST_WARNINGS = 8  # steps that are named; a folder may have any number of them
MOST_REFUSED = 1000  # steps, one after the other; then somebody has to look at the folder
NOTHING: Needs = MappingProxyType({})
T = TypeVar("T")


def steps(folder: Path) -> list[int]:
    """Return the committed steps, oldest first. Nothing is said about whether they can be used."""
    return list(find(folder))


def open_step(folder: Path, step: int, needs: Needs = NOTHING) -> Checkpoint:
    """Open one step, of which only the index is verified; its shards must have the right sizes.

    Raises CheckpointError.

    needs: arrays it must have, with these dtypes and shapes.
    """
    path = find_one(folder, step)
    if path is None:
        steps = listed(find(folder)) or "none"
        raise CheckpointError(
            f"{shown(folder)} has no checkpoint of step {step}, found: {steps}; use one of these"
        )
    return _opened(path, needs, check_sizes)


def _opened(path: Path, needs: Needs, check: Callable[[Checkpoint], None]) -> Checkpoint:
    checkpoint = Checkpoint(path)
    with closed_on_error(checkpoint):
        checkpoint.require(needs)
        check(checkpoint)
    return checkpoint


def open_latest(
    folder: Path, warn: Callable[[str], object] = warnings.warn, needs: Needs = NOTHING
) -> Checkpoint | None:
    """Open the newest step that is whole, or return None if nothing was committed in `folder` yet.

    One rank calls it.

    Steps that are torn, altered, a stranger's, or without what is needed are passed over: `warn` is
    shown why, and which one is used. Raises CheckpointError when there are steps but none can be
    used: a run never starts anew over them by mistake.
    """
    return newest_of(
        folder, list(find(folder).values()), lambda path: _opened(path, needs, verify_data), warn
    )


def verified(
    path: Path, part: VerifiedShare, needs: Needs, each: Callable[[str], object]
) -> tuple[int, dict, str]:
    """Verify a part of a step; return the step, its meta and the configuration it was saved with.

    each: called with the name of each chunk that is read.
    Raises CheckpointError; of the whole step, whoever reads only a part of it, for its index, the
    sizes of its shards, and what is needed.
    """
    with _opened(path, needs, partial(verify_data, each=each, part=part)) as checkpoint:
        return checkpoint.step, checkpoint.meta, checkpoint.about.config


def newest_of(
    folder: Path, committed: Sequence[Path], judge: Callable[[Path], T], warn: Callable[[str], object]
) -> T | None:
    """Return what `judge` returns of the newest step for which it doesn't raise CheckpointError.

    Otherwise as open_latest.
    """
    refused = list[str]()
    for path in reversed(committed):
        try:
            verdict = judge(path)
        except CheckpointError as error:
            refused.append(shown(error.args[0]))
            if len(refused) <= MOST_WARNINGS:
                warn(refused[-1])
            if len(refused) == MOST_REFUSED:
                break
            continue
        if refused:
            more = (
                f", after {len(refused) - MOST_WARNINGS:,} more that can't be used"
                if len(refused) > MOST_WARNINGS
                else ""
            )
            warn(f"using {path.name}{more}")
        return verdict
    if refused:
        why = "; ".join(refused[:MOST_WARNINGS])
        more = f"; and {len(refused) - MOST_WARNINGS:,} more" if len(refused) > MOST_WARNINGS else ""
        more += "; earlier ones were not checked" * (len(refused) < len(committed))
        what = f"{shown(folder)}: no checkpoint can be used: {why}{more}"
        raise CheckpointError(f"{what}; restore one from a copy, or change run.dir")
    return None
