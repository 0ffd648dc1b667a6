"""summary.json: what a run knows at its end alone, for pages (mpitrain report)."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpitrain.cluster.rundir import RunDir
from mpitrain.inputs import replacing, shown
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.memory_table import MemoryRow
from mpitrain.training.checks.comm_report import AxisTotal, RankUsage, axis_totals

if TYPE_CHECKING:
    from mpitrain.planner.after_run import StepTerms


def run_summary(
    plan: Plan,
    usages: Sequence[RankUsage],
    num_steps: int,
    memory: Sequence[MemoryRow],
    slow: Mapping[str, int],
    terms: "StepTerms | None",
) -> dict[str, Any]:
    """Return it. usages: of all ranks, of num_steps steps; num_steps may be 0."""
    costs = axis_totals(usages, num_steps) if num_steps else {}
    parallel = plan.config.parallel
    return {
        "nodes": [usage.node for usage in usages],  # name of the node of each rank
        # ranks along each axis, of which the first varies fastest
        "axes": {name: getattr(parallel, name) for name in ("tp", "cp", "dp", "pp")},
        # what each axis cost a rank in a step, by axis: the mean over ranks and steps but the first
        "comm": {name: _axis(cost) for name, cost in costs.items()},
        "slow": dict(slow),  # how often each rank or link was named as slow (comm.slow_after)
        "memory": [row._asdict() for row in memory],  # bytes of rank 0, predicted and measured
        "predicted_s": dict(terms.predicted) if terms else {},  # seconds of a step by term, as predicted
        "measured_s": dict(terms.measured) if terms else {},  # the same as measured
        # predicted seconds of a microbatch by kind of instruction, of each stage
        "stages": list(terms.stages) if terms else [],
    }


def _axis(cost: AxisTotal) -> dict[str, float]:
    total, count = cost.total, cost.count
    return {
        "bytes": total.num_bytes / count,  # sent by a rank
        "blocked_s": total.blocked_s / count,  # seconds of waiting, posting, copying and adding
        "overlapped_s": total.overlapped_s / count,  # seconds under way while the rank did something else
        "worst_s": cost.worst_s,  # blocked_s of the rank that was blocked longest
        "worst_rank": cost.worst_rank,  # that rank
    }


def write_summary(rundir: RunDir, summary: Mapping[str, Any]) -> str:
    """Write it; return why not, or nothing: a run that is done doesn't fail for it."""
    try:
        with replacing(rundir.summary) as file:
            file.write(json.dumps(summary).encode())
    except OSError as error:
        return f"{shown(rundir.summary)} can't be written: {error.strerror}"
    return ""
