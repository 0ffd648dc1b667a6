"""`mpitrain ckpt verify`: is every byte the one that was written, and is it HDF5?

Each rank reads a share of the chunks.
"""

import time
from collections.abc import Callable

from mpitrain.checkpoint.repair import format_fault
from mpitrain.checkpoint.verify import VerifiedShare, bytes_of, check_chunk, chunks_of
from mpitrain.commands.ckpt.progress_bar import ProgressBar
from mpitrain.commands.ckpt.steps import Steps, steps_at
from mpitrain.commands.ckpt.team import Team, same_everywhere
from mpitrain.errors import DONE, FAILED, CheckpointError
from mpitrain.inputs import as_argument

MOST_SHOWN = 20  # damages of a step


def verify(
    team: Team, given: str, step: int | None, every: bool, sample: float, say: Callable[[str], None]
) -> int:
    """Verify a step, or every one; return 0, or 1 if one is damaged or no valid HDF5. Collective.

    sample: the share of the chunks to read.
    """
    steps = team.on_first_rank("finding the checkpoints", lambda: steps_at(given, step))
    damaged = [
        _verify(team, steps, each, sample, say) for each in (steps.committed if every else [steps.newest])
    ]
    return FAILED if any(damaged) else DONE


def _verify(team: Team, steps: Steps, step: int, sample: float, say: Callable[[str], None]) -> bool:
    """Verify one step, say how it is, and return whether it is damaged or no valid HDF5."""
    begin = time.monotonic()
    if team.on_first_rank("looking for the step", lambda: steps.gone(step)):
        if team.rank == 0:
            say(f"step {step}: removed meanwhile")
        return False
    found, num_bytes, num_chunks = _damages(team, steps, step, sample)
    found = [each for part in team.all_gather("what they have found", found) for each in part]
    fault = ""
    if not found:
        found, fault = team.on_first_rank("checking what HDF5 checks", lambda: _format_fault(steps, step))
    num_bytes, num_chunks = map(
        sum, zip(*team.all_gather("how much they have read", (num_bytes, num_chunks)))
    )
    if team.rank == 0:
        for each in list(dict.fromkeys(found))[:MOST_SHOWN]:
            say(each)
        if len(found) > MOST_SHOWN:
            say(f"... and {len(found) - MOST_SHOWN:,} more")
        if fault:
            say(fault)
        how = (
            "damaged"
            if found
            else "whole"
            if sample == 1
            else f"no damage in {sample:.1%} of the chunks, taken by chance"
        )
        how += ", but no valid HDF5" if fault else ""
        rate = num_bytes / max(time.monotonic() - begin, 1e-9)
        say(
            f"step {step}: {how}; read {num_chunks:,} chunks, {num_bytes / 1e6:,.1f} MB, {rate / 1e6:,.0f} "
            "MB/s"
        )
    return bool(found or fault)


def _format_fault(steps: Steps, step: int) -> tuple[list[str], str]:
    """Return damages of the index of a step, and a message if other programs can't open it.

    None of either if they can, or the step was removed meanwhile.
    """
    try:
        path = steps.path(step)
        fault = format_fault(path)
    except CheckpointError as error:
        return ([] if steps.gone(step) else [error.args[0]]), ""
    advice = f"mpitrain reads it, HDF5 programs don't; type mpitrain ckpt repair {as_argument(path)}"
    return [], fault and f"{path.name}: index.h5 is no valid HDF5: {fault}; {advice}"


def _damages(team: Team, steps: Steps, step: int, sample: float) -> tuple[list[str], int, int]:
    """Return what this rank finds in its share, and how many bytes and chunks of it there were to read."""
    checkpoint, error = None, ""
    try:
        checkpoint = steps.open(step)
    except CheckpointError as found:
        error = found.args[0]
    same_everywhere(team, checkpoint)
    if checkpoint is None:
        return [error], 0, 0
    with checkpoint:
        try:
            mine = chunks_of(checkpoint, VerifiedShare(sample, team.rank, team.size, checkpoint.digest))
        except CheckpointError as error:
            return [error.args[0]], 0, 0
        total = sum(map(bytes_of, mine))
        found = []
        with ProgressBar(f"verifying step {step}", total, team.rank) as progress:
            for chunk in mine:
                try:
                    check_chunk(checkpoint, *chunk)
                except CheckpointError as error:
                    found.append(error.args[0])
                progress.add(bytes_of(chunk))
        return found, total, len(mine)
