"""`mpitrain ckpt verify`, `reshard`, `repair` and `prune`."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from mpitrain.checkpoint.folders import GONE, remove_leftovers
from mpitrain.checkpoint.load import open_latest
from mpitrain.checkpoint.repair import format_fault, rewrite_index
from mpitrain.checkpoint.reshard import reshard
from mpitrain.checkpoint.retention import Policy, Retention, losses_by
from mpitrain.checkpoint.steps import CHECKPOINTS, steps_at
from mpitrain.checkpoint.verify_shared import VerifiedStep, verify_step
from mpitrain.cluster.lock import Lock
from mpitrain.cluster.team import Team
from mpitrain.errors import DONE, FAILED, CheckpointError, ConfigError, counted
from mpitrain.inputs import listed, shown

MOST_DAMAGES = 20  # of a step, or steps that are damaged
MOST_SHOWN = 100  # steps
BEST_BY = "val_loss"


def verify(
    team: Team, path: str, step: int | None, every: bool, sample: float, say: Callable[[str], None]
) -> int:
    """Verify a step, or every one; return 0, or 1 if one is damaged or no valid HDF5. Collective.

    sample: the share of the chunks to read.
    """
    if every and step is not None:
        raise ConfigError(f"--all and --step {step} both say which steps; leave one of them out")
    steps = team.on_first_rank("finding the checkpoints", lambda: steps_at(path, step))
    code = DONE
    for number in steps.committed if every else [steps.newest]:
        verified = verify_step(team, steps, number, sample)
        if team.rank == 0:
            _report(number, verified, sample, say)
        if verified is not None and (verified.damages or verified.fault):
            code = FAILED
    return code


def _report(step: int, verified: VerifiedStep | None, sample: float, say: Callable[[str], None]) -> None:
    if verified is None:
        say(f"step {step}: removed meanwhile")
        return
    _say_some(verified.damages, "", say)
    if verified.fault:
        say(verified.fault)
    how = "intact" if sample == 1 else f"no damage in {sample:.1%} of the chunks, sampled at random"
    how = "damaged" if verified.damages else how
    how += ", but no valid HDF5" if verified.fault else ""
    rate = verified.num_bytes / verified.seconds
    say(
        f"step {step}: {how}; read {counted(verified.num_chunks, 'chunks', ',')}, "
        f"{verified.num_bytes / 1e6:,.1f} MB, {rate / 1e6:,.0f} MB/s"
    )


def _say_some(lines: list[str], what: str, say: Callable[[str], None]) -> None:
    for line in lines[:MOST_DAMAGES]:
        say(line)
    if len(lines) > MOST_DAMAGES:
        say(f"... and {len(lines) - MOST_DAMAGES:,} more{what}")


def rewrite(
    team: Team, path: str, target: str, step: int | None, shards: int, say: Callable[[str], None]
) -> int:
    """Write a step into another folder in so many shards, say so, and return 0. Collective."""
    folder = Path(target)
    done = reshard(team, path, folder, step, shards)
    if team.rank == 0:
        size = f"{done.num_bytes / 1e6:,.1f} MB in {counted(shards, 'shards')}"
        rate = done.num_bytes / done.seconds / 1e6
        say(
            f"step {done.step}: {size} in {shown(folder)}, {rate:,.0f} MB/s; root digest {done.digest}, "
            "as before"
        )
    return DONE


def repair(path: str, step: int | None, say: Callable[[str], None]) -> int:
    """Repair a step, or all; say what was done; return 0, or 1 if a step has another damage.

    Raises CheckpointError if a run is there.
    """
    steps = steps_at(path, step)
    valid = list[int]()
    damaged = list[str]()
    with _without_a_run(steps.folder, say):
        for each in steps.committed:
            try:
                folder = steps.path(each)
                if fault := format_fault(folder):
                    rewrite_index(folder)
                    say(
                        f"step {each}: index.h5 was no valid HDF5 ({fault}); it was rewritten, "
                        "with the same root digest"
                    )
                else:
                    valid.append(each)
            except CheckpointError as error:
                damaged.append(error.args[0])
    if valid:
        steps_named = f"step{'s' * (len(valid) > 1)} {listed(valid)}"
        say(f"nothing to repair in the index of {steps_named}; mpitrain ckpt verify reads all data")
    _say_some(damaged, " that are damaged", say)
    return FAILED if damaged else DONE


def _without_a_run(folder: Path, say: Callable[[str], None]) -> AbstractContextManager[None]:
    """Lock the run directory that checkpoints belong to. Raises CheckpointError for a run."""
    run = folder.absolute().parent
    if folder.absolute().name != CHECKPOINTS or not (run / "config.toml").exists():
        return nullcontext()  # a folder that `mpitrain ckpt reshard` wrote
    return Lock(run, lost=say).held(say, say)


def prune(
    path: str, keep: int, every: int, best: int, best_by: str, dry_run: bool, say: Callable[[str], None]
) -> int:
    """Remove steps up to the newest that is whole, say which, and return 0, or 1 if a step can't be read.

    Raises CheckpointError if none is whole.
    """
    if best_by != BEST_BY and not best:
        raise ConfigError(
            f"--best-by {shown(best_by)} does nothing without --best; add --best, or leave it out"
        )
    steps = steps_at(path)
    if steps.chosen is not None:
        raise CheckpointError(
            f"{shown(path)} is one step; give the folder of all of them, or the run directory"
        )
    refused = list[str]()
    with open_latest(steps.folder, warn=refused.append) as good:
        step = good.step
    for line in refused:
        say(line)
    losses = losses_by(steps.folder, best_by, "leave --best out") if best else {}
    if not dry_run:  # a run's own is left: it is being written
        remove_leftovers(steps.folder, [GONE])
    retention = Retention(steps.folder, Policy(keep, every, best, by=best_by), losses=losses)
    loss = losses.get(step)
    gone = retention.surplus(step, loss) if dry_run else retention.prune(step, loss)
    left = [each for each in steps.committed if each not in gone]
    say(
        f"{'would remove' if dry_run else 'removed'} {_steps(gone)}; "
        f"{'would keep' if dry_run else 'kept'} {_steps(left)}"
    )
    if unreadable := retention.unreadable:
        say(f"kept, since it can't be read: {_steps(unreadable)}; for details: mpitrain ckpt verify --all")
    return FAILED if refused or unreadable else DONE


def _steps(steps: list[int]) -> str:
    return f"{counted(len(steps), 'steps')} ({listed(steps, MOST_SHOWN)})" if steps else "nothing"
