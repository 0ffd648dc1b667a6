"""`mpitrain ckpt prune`: what run.keep does after each save, at once."""

from collections.abc import Callable

from mpitrain.checkpoint.folders import GONE, remove_leftovers
from mpitrain.checkpoint.load import open_latest
from mpitrain.checkpoint.retention import Policy, Retention
from mpitrain.commands.ckpt.steps import steps_at
from mpitrain.errors import DONE, FAILED, CheckpointError
from mpitrain.inputs import listed, shown

MOST_SHOWN = 100  # steps


def prune(
    given: str,
    keep: int,
    every: int,
    best: int,
    dry_run: bool,
    say: Callable[[str], None],
) -> int:
    """Remove steps up to the newest that is whole, say which, and return 0, or 1 if a step can't be read.

    Raises CheckpointError if none is whole.
    """
    steps = steps_at(given)
    if steps.chosen is not None:
        raise CheckpointError(
            f"{shown(given)} is one step; give the folder of all of them, or the run directory"
        )
    refused = list[str]()
    with open_latest(steps.folder, warn=refused.append) as good:
        step = good.step
        loss = good.meta.get("val_loss")
    for line in refused:
        say(line)
    if not dry_run:  # a run's own is left: it is being written
        remove_leftovers(steps.folder, [GONE])
    retention = Retention(steps.folder, Policy(keep, every, best))
    gone = retention.surplus(step, loss) if dry_run else retention.prune(step, loss)
    left = [each for each in steps.committed if each not in gone]
    say(
        f"{'would remove' if dry_run else 'removed'} {_steps(gone)}; "
        f"{'left would be' if dry_run else 'left are'} {_steps(left)}"
    )
    if unreadable := retention.unreadable:
        say(f"left because it can't be read: {_steps(unreadable)}; mpitrain ckpt verify --all says more")
    return FAILED if refused or unreadable else DONE


def _steps(steps: list[int]) -> str:
    return f"{len(steps)} step{'s' * (len(steps) != 1)} ({listed(steps, MOST_SHOWN)})" if steps else "nothing"
