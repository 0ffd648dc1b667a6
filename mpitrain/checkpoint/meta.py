"""What a checkpoint says of its run besides arrays: JSON, of which the trainer's keys are checked on saving and on loading."""

import json
from typing import Annotated

import msgspec
from msgspec import Meta

from mpitrain.checkpoint.hdf5_bytes import ForeignError

MOST_BYTES = 1 << 20
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class Spikes(msgspec.Struct):
    """What training/spikes.py keeps."""

    losses: Annotated[list[float], Meta(max_length=4096)]
    batches_skipped: Count
    rollbacks: Count


class Known(msgspec.Struct):
    """The keys that every checkpoint has, older ones but for `spikes`; others are kept as they are.

    loss_scale: the scale, and steps since it changed.
    """

    step: Count
    tokens: Count
    updates: Count
    skipped: Count
    data: str  # digest of the tokens
    loss_scale: tuple[Annotated[float, Meta(gt=0)], Count]
    spikes: Spikes | None = None


def read_meta(text: str, step: int) -> dict:
    """Return the meta of a step. Raises ForeignError if a key is missing, of another type, or of another step."""
    if len(text) > MOST_BYTES:
        raise ForeignError(f"meta has {len(text):,} characters, at most {MOST_BYTES:,} can be")
    try:
        known = msgspec.json.decode(text, type=Known)
        meta = json.loads(text)
    except RecursionError as error:
        raise ForeignError("meta is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeError, ValueError) as error:
        raise ForeignError(f"meta: {error}") from error
    if known.step != step:
        raise ForeignError(f"meta is of step {known.step}, needed {step}")
    return meta
