"""Layout of a resolved configuration, as predictions of a step take it."""

from mpitrain.config import Config
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.division.batch_division import division_of
from mpitrain.plan.predict.step_time.compute import other_type
from mpitrain.plan.predict.step_time.expert_load import expert_load
from mpitrain.plan.predict.step_time.machine import MachineRates
from mpitrain.plan.routing import RoutingTrace
from mpitrain.schedules import catalog


def layout_of(resolved: ResolvedConfig, rates: MachineRates, trace: RoutingTrace | None = None) -> StepLayout:
    """Return the layout of a resolved configuration. trace: of experts.replay."""
    parallel = resolved.parallel
    memory = resolved.memory
    ranks = parallel.dp * parallel.pp * parallel.tp * parallel.cp
    division = division_of(resolved)
    family = catalog.FAMILIES.get(resolved.pipeline.schedule)
    compiles = resolved.run.compile
    return StepLayout(
        ranks, resolved.data.sequence, resolved.batch.global_, micro=resolved.batch.micro, tp=parallel.tp,
        cp=parallel.cp, pp=parallel.pp, ep=parallel.ep, etp=parallel.etp,
        chunks=resolved.pipeline.chunks or 1, schedule=resolved.pipeline.schedule,
        stages=tuple(resolved.pipeline.stages) if resolved.pipeline.stages else None,
        recompute=recompute_of(memory.recompute),
        segments=catalog.segments_of(family, resolved.pipeline.segments) if family else 1,
        reduce=parallel.reduce, sharded=parallel.dp_shard, zero=parallel.zero or 0,
        compute=compute_of(resolved, rates), sequence_parallel=parallel.sequence,
        fused=rates.on_gpu if compiles == "auto" else bool(compiles),
        wire_bytes=2 if resolved.precision.reduce == "bf16" else 4,
        tp_overlap=0.5 if parallel.async_tp else 0.0,
        dispatch="alltoall" if resolved.experts.dispatch == "flat" else "hierarchical",
        offload_optimizer=memory.offload in ("optimizer", "all"),
        offload_activations=memory.offload in ("activations", "all"), regathers=parallel.regather,
        core_again=True, context=parallel.context, gather=parallel.gather,
        expert_load=expert_load(resolved, trace), capacity=resolved.experts.capacity,
        longest=0 if division.is_even else division.longest,
    )  # fmt: skip


def recompute_of(asked: str) -> str:
    """Return the recomputation that a step is predicted with: groups of blocks cost what whole blocks do."""
    return "full" if asked == "every-k" else asked


def compute_of(config: Config, rates: MachineRates) -> str:
    """Return the type of numbers that products have a rate for: the configuration's, or the nearest."""
    compute = config.precision.compute
    return compute if compute in rates.products else other_type(rates)
