"""`pipeline.schedule = "auto"` and `pipeline.trace`: which schedule a layout has, and what it plans with.

The choice depends on the layout alone, so that all ranks make it alike; what is resolved names it.
"""

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from mpitrain.config import Config, Pipeline, with_values
from mpitrain.errors import ConfigError, counted
from mpitrain.inputs import read_text, shown
from mpitrain.plan.declared.family import family_of
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.stages import stages_of
from mpitrain.plan.settings.pipeline_table import given_options, num_microbatches, schedule_of
from mpitrain.schedules import catalog
from mpitrain.schedules.auto_choice import AUTO, Choice, StageTimesOf, fastest
from mpitrain.schedules.limits import MOST_TRACE_BYTES
from mpitrain.schedules.options import Options, StageTimes, Times
from mpitrain.schedules.play.measured import read_trace
from mpitrain.schedules.play.stage_work import StageWork, share_of_rank, stage_work

TRACE = "trace.json"  # of a run directory
NOTHING = StageTimes(0, 0, 0)


def with_schedule(config: Config, resolve: Callable[[Config], ResolvedConfig]) -> Config:
    """Return a configuration whose schedule has been chosen and whose times have been read.

    resolve: resolves the configuration with the default schedule, for its layout.
    """
    if config.pipeline.schedule != AUTO and not config.pipeline.trace:
        return config
    layout = resolve(msgspec.structs.replace(config, pipeline=Pipeline()))
    return msgspec.structs.replace(config, pipeline=_chosen(config.pipeline, layout))


def _chosen(pipeline: Pipeline, layout: ResolvedConfig) -> Pipeline:
    """Return a pipeline with the name of its schedule and the times that it is planned with.

    Raises ConfigError for a trace that can't be read, ScheduleError if no schedule fits.
    """
    if pipeline.trace and (pipeline.times or pipeline.stage_times):
        key = "times" if pipeline.times else "stage_times"
        raise ConfigError(f"pipeline.trace and pipeline.{key} both say how long stages take; leave one out")
    if pipeline.schedule == AUTO:
        return _with_choice(pipeline, _choose(pipeline, layout))
    family = schedule_of(pipeline.schedule)
    if "times" not in family.takes:
        takes = ", ".join(name for name, one in catalog.FAMILIES.items() if "times" in one.takes)
        raise ConfigError(
            f"pipeline.trace has no effect on {pipeline.schedule}, which plans with no times; use "
            f'pipeline.schedule = "{AUTO}", or one of {takes}'
        )
    plan = _plan(pipeline, layout)
    chunks = catalog.chunks_of(pipeline.schedule, pipeline.chunks, family)
    stages = None
    if "stage_times" in family.takes and plan.of_stages is not None:
        stages = plan.of_stages(catalog.placement(pipeline.schedule, layout.parallel.pp, chunks))
    return _with_times(pipeline, plan.times, stages)


def _choose(pipeline: Pipeline, layout: ResolvedConfig) -> Choice:
    pp = layout.parallel.pp
    stages = pipeline.stages or pipeline.stage_times
    if stages and (len(stages) % pp or pipeline.chunks not in (None, len(stages) // pp)):
        raise ConfigError(
            f"pipeline.{'stages' if pipeline.stages else 'stage_times'}: found "
            f"{counted(len(stages), 'stages')}, needed "
            f"parallel.pp = {pp} x {pipeline.chunks or 'a number of chunks'}"
        )
    layers = layout.model.layers
    if (number := pp * (pipeline.chunks or 1)) > layers:
        raise ConfigError(
            f"parallel.pp = {pp} x pipeline.chunks = {pipeline.chunks} = {counted(number, 'stages')} for "
            f"model.layers = {counted(layers, 'blocks')}; a stage needs at least one block"
        )
    plan = _plan(pipeline, layout)
    chunks = len(stages) // pp if stages else pipeline.chunks
    options = Options(chunks=chunks, times=plan.times, **given_options(pipeline))
    return fastest(pp, num_microbatches(layout), options, plan.of_stages, layers, plan.error)


def _with_choice(pipeline: Pipeline, choice: Choice) -> Pipeline:
    """Return a pipeline with the chosen schedule, and without keys that it has no use for."""
    options = choice.options
    limits_weights = "weight_memory" in catalog.FAMILIES[choice.name].takes and options.memory_limit
    return msgspec.structs.replace(
        _with_times(pipeline, options.times, options.stage_times),
        schedule=choice.name,
        chunks=options.chunks if choice.name in catalog.LOOPED else None,
        memory_limit=options.memory_limit,
        weight_memory=options.weight_memory if limits_weights else None,
        recompute=options.recompute,
        offload=options.offload,
    )


def _with_times(
    pipeline: Pipeline, times: Times | None, stage_times: Sequence[StageTimes] | None
) -> Pipeline:
    return msgspec.structs.replace(
        pipeline,
        trace="",
        times=list(times) if times else None,
        stage_times=[list(one) for one in stage_times] if stage_times else None,
    )


# ---------------------------------------------------------------- times


class PlannedTimes(NamedTuple):
    """Times of a rank's share, and of each stage by the stages' ranks; None: equal shares.

    error: the share by which they may be wrong.
    """

    times: Times
    of_stages: StageTimesOf | None
    error: float = 0


def _plan(pipeline: Pipeline, layout: ResolvedConfig) -> PlannedTimes:
    """Return what to plan with: what a trace measured, what the user says, or else the products' sizes."""
    pp = layout.parallel.pp
    if pipeline.stage_times:
        stages = tuple(StageTimes(*one) for one in pipeline.stage_times)
        message = pipeline.times[3] if pipeline.times else 0
        return PlannedTimes(share_of_rank(stages, pp, message), lambda rank_of: stages)
    if pipeline.times:
        return PlannedTimes(Times(*pipeline.times), None)
    model = family_of(layout.model).layers(layout)
    divided = with_values(layout, {"pipeline.stages": pipeline.stages})
    work = _measured(pipeline.trace) if pipeline.trace else _products(model, layout)

    def of_stages(rank_of: tuple[int, ...]) -> tuple[StageTimes, ...]:
        return work.stage_times([stage.work for stage in stages_of(divided, model, rank_of, 1)], rank_of)

    ranks = tuple(range(pp))
    even = [stage.work for stage in stages_of(layout, model, ranks, 1)]
    times = share_of_rank(work.stage_times(even, ranks), pp, work.message)
    return PlannedTimes(times, of_stages, work.error)


def _products(model: ModelLayers, layout: ResolvedConfig) -> StageWork:
    """Return times by multiplications, of which forward and both backwards have as many.

    The unit is a rank's share.
    """
    sequence = layout.data.sequence
    head = model.last.flops(sequence) / 6
    unit = layout.parallel.pp / (head + model.block_flops(sequence) / 6)
    return StageWork(StageTimes(unit, unit, unit), NOTHING, StageTimes(*[unit * head] * 3), 0)


def _measured(trace: str) -> StageWork:
    """Read a trace. It may be the directory of its run."""
    path = Path(trace, TRACE) if os.path.isdir(trace) else Path(trace)
    try:
        state = os.stat(path)
        return _work(str(path), state.st_mtime_ns, state.st_size)
    except OSError as error:
        raise ConfigError(
            f'pipeline.trace = "{shown(trace)}" can\'t be read: {error.strerror}; needed a run '
            f"with run.trace, or its {TRACE}"
        ) from None


@lru_cache(4)
def _work(path: str, changed: int, size: int) -> StageWork:
    """Read a trace once, unless it has changed."""
    return stage_work(read_trace(read_text(path, MOST_TRACE_BYTES), shown(path)))
