"""State of a checkpoint, converted from the configuration in the step.

A copy of a run may have another batch, sequence length or precision.
"""

from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config
from mpitrain.errors import CheckpointError
from mpitrain.inputs import shown

MOST = 1 << 53  # sequences


def sequences_read(saved: Checkpoint, config: Config) -> int:
    """Return the place in the data's order of the next sequence, counted in sequences of `config`.

    Another data.sequence rounds it up, so that no token is counted twice. Raises CheckpointError
    for a place that no run reaches.
    """
    count = saved.meta.get("sequences")
    if count is None:  # of an older version
        skipped = (saved.meta.get("spikes") or {}).get("batches_skipped", 0)
        count = (saved.meta["step"] + skipped) * _saved(saved, "batch.global", config.batch.global_)
    num_tokens = count * _saved(saved, "data.sequence", config.data.sequence)
    place = -(-num_tokens // config.data.sequence)
    if place > MOST:
        what = f"{shown(saved.path)}: found {place:,} sequences read"
        raise CheckpointError(f"{what}; it is damaged, remove it")
    return place


def compute_of(saved: Checkpoint, config: Config) -> str:
    """Return the precision.compute that a step was saved with."""
    return str(saved.about.settings.get("precision.compute", config.precision.compute))


def _saved(saved: Checkpoint, key: str, otherwise: int) -> int:
    """Return a count of the configuration in a step; `otherwise` if it doesn't say it."""
    value = saved.about.settings.get(key)
    return value if type(value) is int and value > 0 else otherwise
