"""Which steps are kept: the newest, one of every so many for ever, and the best by a metric.

The metric is `val_loss`, the validation loss, NAME/METRIC of what a checkpoint says of tasks and
sources, such as hellaswag/acc_norm, or any other number of metrics.jsonl. The best step has the
highest of HIGHER_IS_BETTER, the least of all other metrics, and of equal ones the latest.

    keep = 2, every = 30, best = 1  committed: 10 20 30 40 50 60 70, validation loss is least at 20
                                    kept: 20 (best), 30 and 60 (every), 60 and 70 (newest)

Only steps up to one that is known to be good are looked at, and that one always stays: later ones,
from before a run went back, are replaced when it gets there. What can't be read, or was found
damaged, counts for nothing and is left for a person to look at.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpitrain.checkpoint.files import reason
from mpitrain.checkpoint.folders import discard, find
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.checkpoint.recorded_metrics import recorded_metrics
from mpitrain.checkpoint.verify import check_sizes
from mpitrain.errors import CheckpointError
from mpitrain.inputs import listed, shown

BEST = "best"  # in place of a step's number; also "best:METRIC"
# of what a checkpoint says of its step; kept_by: the number that run.keep_best_by names
VAL_LOSS, EVALUATIONS, KEPT_BY = "val_loss", "evaluations", "kept_by"
# as lm-evaluation-harness has it; and speed
HIGHER_IS_BETTER = {"acc", "acc_norm", "acc_bytes", "exact_match", "tokens_per_s", "mfu", "hfu"}
MOST_NAMED = 20  # metrics in a message


@dataclass(frozen=True)
class Policy:
    """newest: how many of them are kept; 0: all.

    every: steps that it divides are kept; 0: none for that.
    best: how many are kept.
    back: of the steps that it divides the newest is kept; 0: none for that.
    by: the metric of the best ones.
    """

    newest: int = 0
    every: int = 0
    best: int = 0
    back: int = 0
    by: str = VAL_LOSS

    def kept(self, losses: Mapping[int, float | None]) -> set[int]:
        """Return which of some steps are kept.

        losses: the metric of each, the less the better, None where there was none.
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
    losses: the metric of steps that were looked at; UNREADABLE of those that can't be read.
    """

    folder: Path
    policy: Policy
    damaged: set[int] = field(default_factory=set)
    losses: dict[int, object] = field(default_factory=dict)

    def loss(self, meta: Mapping[str, Any]) -> float | None:
        """Return the metric of a step by what its checkpoint says, the less the better."""
        return loss_of(meta, self.policy.by)

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
        known = self.losses | {good: loss}
        losses = {
            step: known[step] if step in known else _loss_at(path, self.policy.by)
            for step, path in committed.items()
        }
        self.losses = losses
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
                kept = "is intact" if committed[step].is_dir() else "is removed in part"
                removed = f"step {listed(surplus[:number])}" if number else "nothing"
                raise CheckpointError(
                    f"{shown(self.folder)}: step {step} cannot be removed, it {kept}: {reason(error)}; "
                    f"removed before: {removed}; check the file system, then prune again"
                ) from error
        return surplus

    @property
    def unreadable(self) -> list[int]:
        """Steps that were looked at last and can't be read: none of them is removed."""
        return [step for step, loss in self.losses.items() if loss is UNREADABLE]


def best_step(folder: Path, choice: str = BEST) -> int:
    """Return the best step. Raises CheckpointError.

    choice: "best": by validation loss; "best:METRIC".
    """
    losses = losses_by(folder, choice.partition(":")[2] or VAL_LOSS, "give --step a number")
    return -min((loss, -step) for step, loss in losses.items() if isinstance(loss, float))[1]


def losses_by(folder: Path, by: str, instead: str) -> dict[int, object]:
    """Return a metric of steps, the less the better; UNREADABLE of those that can't be read.

    A metric that no checkpoint says is looked for in metrics.jsonl and evaluations.jsonl of the run
    directory, the parent of the folder. Raises CheckpointError if no whole step has it, which says
    what to do instead.
    """
    known: set[str] = set()
    for losses, names in _losses(folder, by):
        if any(isinstance(loss, float) for loss in losses.values()):
            return losses
        known |= names
    if by == VAL_LOSS:
        raise CheckpointError(
            f"{shown(folder)}: found no intact step that was validated when it was saved; {instead}"
        )
    known |= {name for path in find(folder).values() for name in _metrics_at(path)}
    of_run_first = sorted(known, key=lambda name: ("/" in name, name))
    has = ", ".join(map(shown, of_run_first[:MOST_NAMED])) or "none"
    raise CheckpointError(
        f"{shown(folder)}: found no intact step with the metric {shown(by)}, but {has}; use one of these, "
        f"or {instead}"
    )


def _losses(folder: Path, by: str) -> Iterator[tuple[dict[int, object], set[str]]]:
    """Yield a metric of whole steps, the less the better, and known names; place by place."""
    losses = {step: _loss_at(path, by) for step, path in find(folder).items()}
    yield losses, set()
    whole = [step for step, loss in losses.items() if loss is not UNREADABLE]
    for metrics in recorded_metrics(folder.absolute().parent, whole):
        names = {name for of_step in metrics.values() for name in of_step}
        recorded = {step: _lower_is_better(of.get(by), by) for step, of in metrics.items()}
        yield losses | recorded, names


UNREADABLE = object()


def loss_of(meta: Mapping[str, Any], by: str) -> float | None:
    """Return a metric that a checkpoint says, the less the better; None: it says none."""
    return _lower_is_better(_metrics(meta).get(by), by)


def _lower_is_better(value: float | None, by: str) -> float | None:
    return -value if value is not None and by.rpartition("/")[2] in HIGHER_IS_BETTER else value


def _metrics(meta: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite metrics that a checkpoint says, by name."""
    said = {VAL_LOSS: meta.get(VAL_LOSS)} | (meta.get(KEPT_BY) or {})
    for name, metrics in (meta.get(EVALUATIONS) or {}).items():
        said |= {f"{name}/{metric}": value for metric, value in metrics.items()}
    return {name: float(value) for name, value in said.items() if value is not None and math.isfinite(value)}


def _metrics_at(path: Path) -> dict[str, float]:
    try:
        with Checkpoint(path) as checkpoint:
            return _metrics(checkpoint.meta)
    except CheckpointError:
        return {}


def _loss_at(path: Path, by: str) -> object:
    try:
        with Checkpoint(path) as checkpoint:
            check_sizes(checkpoint)
            return loss_of(checkpoint.meta, by)
    except CheckpointError:
        return UNREADABLE
