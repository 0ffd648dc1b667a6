"""What a run that resumes has in common with its past: the order of its data, what was read, the rate.

A change of what is done already is refused; one of the learning rate is reported.
"""

import tomllib
from contextlib import suppress
from itertools import count
from pathlib import Path

from mpitrain.config import Config, flatten, parse, plugins_of
from mpitrain.data.batch_sizes import BatchSizes
from mpitrain.data.mixture import MixtureSampler, Samplers, SkippingSampler, mixture_of, places_after_skips
from mpitrain.data.permutation import FEISTEL, ORDERS, SORTED
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.inputs import shown
from mpitrain.optim.rates import learning_rate
from mpitrain.plan.plan import Plan
from mpitrain.training.saving.newest import Newest

RATE_KEYS = ("optimizer.lr", *(f"schedule.{key}" for key in ("name", "warmup", "decay", "final")))


def order_of(asked: str | None, newest: Newest, checkpoints: Path) -> str:
    """Return the order of a run's data: its checkpoint's, else data.order as asked, if it is given.

    Raises CheckpointError for one that isn't known here, and where both differ.
    """
    if not newest.step:
        return asked or FEISTEL
    recorded = newest.order or SORTED
    if recorded not in ORDERS:
        raise CheckpointError(
            f"{shown(checkpoints)}: trained on data in the order {shown(recorded)}, known here are "
            f"{', '.join(ORDERS)}; resume with the version of mpitrain that wrote it"
        )
    if asked not in (None, recorded):
        raise CheckpointError(
            f'{shown(checkpoints)}: trained with data.order = "{recorded}", this run has "{asked}"; leave '
            "data.order out, or choose another run.dir"
        )
    return recorded


def saved_config(newest: Newest, config: Config) -> Config | None:
    """Return the configuration that a checkpoint was saved with: config.toml may be edited since.

    None if the step doesn't say it, or names another plug-in than `config`.
    """
    with suppress(ConfigError, ValueError, RecursionError):
        tree = tomllib.loads(newest.config)
        return parse(tree, plugins_of(config)) if tree else None
    return None


def change_of_rate(before: Config, now: Config, step: int) -> str:
    """Say so if a run that resumes after `step` has another rate than it would have; else ""."""
    had = learning_rate(before, step)
    if had == learning_rate(now, step):
        return ""
    rates = f"step {step} had {had:.2e}, step {step + 1} has {learning_rate(now, step + 1):.2e}"
    old, new = flatten(before), flatten(now)
    if keys := [key for key in RATE_KEYS if old[key] != new[key]]:
        return f"learning rate: {rates}, since {' and '.join(keys)} changed"
    steps = before.schedule.steps or before.run.steps
    return (
        f"learning rate: {rates}, since the schedule is for {now.schedule.steps or now.run.steps} steps now, "
        f"and was for {steps}; --set schedule.steps={steps} keeps it, with its last rate after that"
    )


def require_same_past(newest: Newest, config: Config, checkpoints: Path, train: Samplers) -> None:
    """Raise CheckpointError if the data of steps that are done would differ. train: read now."""
    before = saved_config(newest, config) if newest.step else None
    if before is None:
        return
    try:
        _require_same_growth(newest.step, before, config)
        read = newest.sequences or BatchSizes(before.batch).before(newest.step + 1)
        _require_same_skip(newest.step, before, config, read)
        train = train.whole if isinstance(train, SkippingSampler) else train
        if isinstance(train, MixtureSampler):
            _require_same_mixture(newest.step, before, config, read, train)
    except CheckpointError as error:
        raise CheckpointError(f"{checkpoints}: {error.args[0]}") from None


def _require_same_mixture(
    step: int, before: Config, config: Config, read: int, train: MixtureSampler
) -> None:
    """Raise CheckpointError unless the sequences that the run has read have the sources that they had."""
    now, past = BatchSizes(config.batch), BatchSizes(before.batch)
    sizes = train.sizes
    same = len(before.data.sources) == len(sizes)
    if same and mixture_of(before.data, past, sizes).until(read) == train.mixture.until(read):
        return
    what = f"data.sources had other weights in the {step} steps that are done"
    if now.at(1) != past.at(1) and before.data.sources == config.data.sources:
        what = f"{what} with batch.global = {past.at(1)}, as weights change at a step"
        growth = f"batch.growth = [[{step + 1}, {now.at(1)}]]"
        raise CheckpointError(f"{what}; keep it, and set {growth}")
    first = next(later for later in count(step + 1) if now.before(later) >= read)
    change = f"give new ones from a later step on: weight = [[1, ...], [{first}, ...]]"
    raise CheckpointError(f"{what}; keep those, and {change}")


def _require_same_growth(step: int, before: Config, config: Config) -> None:
    """Raise CheckpointError if batches or rows changed for steps that the run has done already."""
    if not any(each.batch.growth or each.batch.lengths for each in (before, config)):
        return  # another batch.global reads on from where the run is
    past, now = (BatchSizes(each.batch) for each in (before, config))
    first = now.first_difference(past, step, config.data.sequence)
    if first is None:
        return
    raise CheckpointError(
        f"batch.growth or batch.lengths was another one from step {first} on, and {step} steps are "
        f"done; keep what it was for these, and give new ones from step {step + 1} on"
    )


def _require_same_skip(step: int, before: Config, config: Config, read: int) -> None:
    """Raise CheckpointError if data.skip changed for sequences that were passed already."""
    reached = int(places_after_skips([read], before.data.skip)[0])
    changed = {*before.data.skip} ^ {*config.data.skip}
    passed = sorted(first for first, _ in changed if first < reached)
    if passed:
        raise CheckpointError(
            f"data.skip has another range from sequence {passed[0]:,} on, which step {step} has "
            "passed; keep what it was up to there, or remove the checkpoints after it, to resume "
            "from an earlier one"
        )


def require_same_routing(newest: Newest, plan: Plan, checkpoints: Path) -> None:
    """Raise CheckpointError if the run has trained with another content of experts.replay."""
    routing = plan.routing
    if routing and newest.routing not in ("", routing.digest):
        key = f"experts.replay = {shown(plan.config.experts.replay)}"
        what = f"{checkpoints}: trained with another content of {key} than it has now"
        raise CheckpointError(f"{what}; put back what it had, or choose another run.dir")
