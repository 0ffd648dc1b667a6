"""What a checkpoint says of its run besides arrays.

JSON, of which the trainer's keys are checked on saving and on loading.

And who wrote it, with the configuration: by its rules the state is read (training/saving/state_io.py).
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from mpitrain.checkpoint.hdf5_bytes import ForeignError

MOST_BYTES = 1 << 20
Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class SpikeHistory(msgspec.Struct):
    """What training/checks/spikes.py keeps."""

    losses: Annotated[list[float], Meta(max_length=4096)]
    batches_skipped: Count
    rollbacks: Count


class Known(msgspec.Struct):
    """The keys that every checkpoint has, and some that older ones lack; others are kept as they are.

    loss_scale: the scale, and steps since it changed.
    """

    step: Count
    tokens: Count
    updates: Count
    skipped: Count
    data: str  # digest of the tokens
    loss_scale: tuple[Annotated[float, Meta(gt=0)], Count]
    val_loss: float | None = None  # of the validation after this step, if there was one
    evaluations: dict[str, dict[str, float | None]] | None = None  # likewise of sources and tasks
    kept_by: dict[str, float | None] | None = None  # number of the step that run.keep_best_by names
    sequences: Count = 0  # of the data's order that come before those of the next step
    spikes: SpikeHistory | None = None
    order: str = ""  # of the data in an epoch (data/permutation.py); "": sorted, in older ones
    routing: str = ""  # digest of experts.replay, if there is one
    skipped_in_a_row: Count = 0


def read_meta(text: str, step: int) -> dict:
    """Return the meta of a step.

    Raises ForeignError if a key is missing, of another type, or of another step.
    """
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


@dataclass(frozen=True)
class StepInfo:
    """Who wrote a step.

    config: the resolved configuration, TOML.
    writer: what JSON can hold: versions, layout, host, when.
    """

    config: str = ""
    writer: Mapping[str, object] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, object]:
        """The configuration by key, `model.layers`; empty if there is none."""
        tables = {
            name: table for name, table in tomllib.loads(self.config).items() if isinstance(table, dict)
        }
        return {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}

    def attributes(self) -> dict[str, str]:
        """Return it as attributes of an index."""
        return {"config": self.config, "writer": json.dumps(dict(self.writer), sort_keys=True)}

    def require_readable(self) -> None:
        """Raise ForeignError unless read_about() reads it back."""
        read_about(self.attributes())


NOBODY = StepInfo()


def read_about(attributes: Mapping[str, object]) -> StepInfo:
    """Return who wrote a step. Raises ForeignError for what mpitrain doesn't write."""
    config = attributes.get("config")
    writer = attributes.get("writer")
    for name, text in (("config", config), ("writer", writer)):
        if not isinstance(text, str) or len(text) > MOST_BYTES:
            raise ForeignError(
                f"the attribute {name} is missing, or no text of at most {MOST_BYTES:,} characters"
            )
    try:
        tomllib.loads(config)
        facts = json.loads(writer)
    except (RecursionError, ValueError) as error:
        raise ForeignError(f"config or writer: {error}") from error
    if not isinstance(facts, dict):
        raise ForeignError("the attribute writer is no JSON object")
    return StepInfo(config, facts)
