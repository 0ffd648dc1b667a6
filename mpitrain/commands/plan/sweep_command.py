"""`mpitrain sweep`: layouts, or numbers of ranks."""

from collections.abc import Callable, Mapping
from typing import Any

from mpitrain.cluster.guard import Guard
from mpitrain.commands.plan.layout_sweep import sweep
from mpitrain.commands.plan.scaling_sweep import sweep_ranks
from mpitrain.commands.plan.sweep_request import SweepRequest


def measure_all(asked: Mapping[str, Any], guard: Guard, say: Callable[[str], None]) -> int:
    """Measure what the options ask for, return the exit code. Collective over all ranks."""
    request = SweepRequest(**asked)
    return (sweep if request.scaling is None else sweep_ranks)(request, guard, say)
