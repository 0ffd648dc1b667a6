"""Verify a step with all ranks: each reads a share of the chunks."""

import time
from typing import NamedTuple

from mpitrain.checkpoint.repair import format_fault
from mpitrain.checkpoint.steps import Steps, same_everywhere
from mpitrain.checkpoint.verify import VerifiedShare, bytes_of, check_chunk, chunks_of
from mpitrain.cluster.progress_bar import ProgressBar
from mpitrain.cluster.team import Team
from mpitrain.errors import CheckpointError
from mpitrain.inputs import as_argument


class VerifiedStep(NamedTuple):
    """What was found of a step, alike on all ranks.

    damages: messages, each once. fault: why other programs can't open it, or "".
    """

    damages: list[str]
    fault: str
    num_bytes: int
    num_chunks: int
    seconds: float


def verify_step(team: Team, steps: Steps, step: int, sample: float) -> VerifiedStep | None:
    """Return what was found of a step, None if it was removed meanwhile. Collective.

    sample: the share of the chunks to read.
    """
    begin_s = time.monotonic()
    if team.on_first_rank("looking for the step", lambda: steps.gone(step)):
        return None
    mine, num_bytes, num_chunks = _damages(team, steps, step, sample)
    damages = [damage for part in team.all_gather("what they have found", mine) for damage in part]
    fault = ""
    if not damages:
        damages, fault = team.on_first_rank("checking what HDF5 checks", lambda: _index_faults(steps, step))
    read = team.all_gather("how much they have read", (num_bytes, num_chunks))
    num_bytes, num_chunks = map(sum, zip(*read))
    seconds = max(time.monotonic() - begin_s, 1e-9)
    return VerifiedStep(list(dict.fromkeys(damages)), fault, num_bytes, num_chunks, seconds)


def _index_faults(steps: Steps, step: int) -> tuple[list[str], str]:
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
