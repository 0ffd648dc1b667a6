"""Which steps are kept: the newest, one of every so many for ever, and the best by validation loss.

    keep = 2, every = 30, best = 1  committed: 10 20 30 40 50 60 70, validation loss is least at 20
                                    kept: 20 (best), 30 and 60 (every), 60 and 70 (newest)

Only steps up to one that is known to be good are looked at, and that one always stays: later ones,
from before a run went back, are replaced when it gets there. What can't be read, or was found
damaged, counts for nothing and is left for a person to look at.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.folders import discard, find
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.verify import check_sizes
from mpitrain.errors import CheckpointError
from mpitrain.inputs import listed, shown


@dataclass(frozen=True)
class Policy:
    """newest: how many of them are kept; 0: all.

    every: steps that it divides are kept; 0: none for that.
    best: how many are kept.

    back: of the steps that it divides the newest is kept; 0: none for that.
    """

    newest: int = 0
    every: int = 0
    best: int = 0
    back: int = 0

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return which of some steps are kept.

        losses: the validation loss of each, None where there was none.
        """
        if not self.newest:
            return set(losses)
        kept = set(sorted(losses)[-self.newest :])
        kept |= {step for step in losses if self.every and step % self.every == 0}
        kept |= set([step for step in sorted(losses) if self.back and step % self.back == 0][-1:])
        # of equal ones the later
        by_loss = sorted((loss, -step) for step, loss in losses.items() if loss is not None)
        return kept | {-step for _, step in by_loss[: self.best]}


@dataclass
class Retention:
    """A policy for the steps of one folder; remembers what it has read of them.

    damaged: steps that are, until they are saved again.
    """

    folder: Path
    policy: Policy
    damaged: set[int] = field(default_factory=set)
    # by step; UNREADABLE of those that can't be read
    _losses: dict[int, object] = field(default_factory=dict)

    def surplus(self, good: int, loss: float | None) -> list[int]:
        """Return the steps up to `good`, which is whole and has this loss, that the policy doesn't keep.

        Raises CheckpointError.
        """
        if not self.policy.newest:
            return []
        self.damaged.discard(good)
        committed = {
            step: path
            for step, path in find(self.folder).items()
            if step <= good and step not in self.damaged
        }
        known = self._losses | {good: loss}
        losses = {step: known[step] if step in known else _loss_of(path) for step, path in committed.items()}
        self._losses = losses
        readable = {step: loss for step, loss in losses.items() if loss is not UNREADABLE}
        kept = self.policy.kept(readable) | {good}
        return [step for step in readable if step not in kept]

    def prune(self, good: int, loss: float | None) -> list[int]:
        """Remove them, and return which. Raises CheckpointError.

        A kill at any moment leaves whole steps, and what the next save or prune removes.
        """
        surplus = self.surplus(good, loss)
        committed = find(self.folder)
        for number, step in enumerate(surplus):
            try:
                discard(committed[step])
            except OSError as error:
                kept = "is whole" if committed[step].is_dir() else "is removed in part"
                removed = f"step {listed(surplus[:number])}" if number else "nothing"
                raise CheckpointError(
                    f"{shown(self.folder)}: step {step} cannot be removed, it {kept}: {reason(error)}; "
                    f"removed before: {removed}; check the file system, then prune again"
                ) from error
        return surplus

    @property
    def unreadable(self) -> list[int]:
        """Steps that were looked at last and can't be read: none of them is removed."""
        return [step for step, loss in self._losses.items() if loss is UNREADABLE]


def best_step(folder: Path) -> int:
    """Return the step with the least validation loss, the later of two. Raises CheckpointError."""
    losses = {step: _loss_of(path) for step, path in find(folder).items()}
    validated = [(loss, -step) for step, loss in losses.items() if isinstance(loss, float)]
    if not validated:
        raise CheckpointError(
            f"{shown(folder)}: found no whole step that was validated when it was saved; give --step a number"
        )
    return -min(validated)[1]


BEST = "best"  # in place of a step's number
UNREADABLE = object()


def _loss_of(path: Path) -> object:
    try:
        with Checkpoint(path) as checkpoint:
            check_sizes(checkpoint)
            return checkpoint.meta.get("val_loss")
    except CheckpointError:
        return UNREADABLE
