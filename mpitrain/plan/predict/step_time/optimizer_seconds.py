"""Seconds of an update: passes over memory; products with whole matrices, and messages that bring them."""

import heapq
from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from mpitrain.plan.declared.optimizers import OptimizerKind, optimizer_kind
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.compute import product_seconds
from mpitrain.plan.predict.step_time.machine import HOST_COPY, HOST_UPDATE, MachineRates
from mpitrain.plan.predict.step_time.network import group_of, seconds
from mpitrain.plan.predict.step_time.stage_seconds import (
    CALLS_OF_MESSAGE,
    SLOWED,
    most_weights,
    stages_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import Piece, StepModel

ITEM = 4  # bytes of a number of weights, gradients and moments
NARROW_COPY_BYTES = 6  # of each number: it is read, and written in 16 bits to compute with


class _Matrix(NamedTuple):
    """A matrix that an optimiser puts together. took: seconds of whoever computes it."""

    numel: int
    took: float


def owned_numbers(model: StepModel, layout: StepLayout) -> float:
    """Return how many numbers the pipeline rank with most weights updates and saves, of its shard."""
    dense, experts = most_weights(model, layout)
    return dense / layout.shards + experts / layout.expert_shards


def update_seconds(model: StepModel, layout: StepLayout, machine: MachineRates) -> float:
    """Return the seconds of an update, with what master weights in host memory add to it."""
    kind = optimizer_kind(model.config.optimizer)
    here = _elementwise_seconds(model, layout, machine, kind)
    if not kind.whole_matrices:
        return here
    return here + max(
        _whole_matrices_seconds(model, layout, machine, kind, matrices)
        for matrices in _matrices_of_ranks(model, layout, machine, kind)
    )


def _elementwise_seconds(
    model: StepModel, layout: StepLayout, machine: MachineRates, kind: OptimizerKind
) -> float:
    """Return the seconds of what an optimiser does with each number by itself."""
    owned = owned_numbers(model, layout)
    num_bytes = ITEM * kind.passes(model.config.optimizer, "table") + NARROW_COPY_BYTES
    here = num_bytes * owned / machine.memory_bandwidth + 50 * machine.launch_s
    if not layout.offload_optimizer:
        return here
    if not machine.on_gpu:
        return here + 2 * (ITEM + layout.item) * owned / machine.memory_bandwidth
    # gradients come while others are updated, weights go back after that (optim/offload.py)
    copied = owned / (machine.host_copy or HOST_COPY)
    updating = owned / (machine.host_update or HOST_UPDATE)
    return max(ITEM * copied, updating) + layout.item * copied


def _whole_matrices_seconds(
    model: StepModel, layout: StepLayout, machine: MachineRates, kind: OptimizerKind, matrices: list[_Matrix]
) -> float:
    """Return what an optimiser's matrices on a pipeline rank add to its update.

    They are dealt to the ranks that have parts of them, which send these there and back, in rounds
    of a matrix each (optim/matrices.py); without ZeRO each data rank has all of its stages.
    """
    settings = model.config.optimizer
    holders = layout.tp * layout.shards
    own_bytes = ITEM * sum(matrix.numel for matrix in matrices) / holders
    more = kind.passes(settings, "matrix") - kind.passes(settings, "table")
    computed = _longest_queue((matrix.took for matrix in matrices), holders)
    sent = 2 * seconds("all_to_all", own_bytes, group_of(holders, 1, machine), machine)
    if holders > 1 and not machine.on_gpu:
        sent += 2 * -(-len(matrices) // holders) * CALLS_OF_MESSAGE * machine.launch_s
    exposed = max(sent - computed, SLOWED * sent) if machine.sends_meanwhile else sent
    return own_bytes * more / machine.memory_bandwidth + computed + exposed


def _matrices_of_ranks(
    model: StepModel, layout: StepLayout, machine: MachineRates, kind: OptimizerKind
) -> list[list[_Matrix]]:
    """Return the matrices that an optimiser puts together, of each pipeline rank."""
    settings = model.config.optimizer

    def matrix(shape: tuple[int, ...]) -> _Matrix:
        work = kind.work(settings, *shape)
        took = sum(product_seconds(product, machine, "fp32") for product in work.products)
        took += work.pass_bytes / machine.memory_bandwidth + work.kernels * machine.launch_s
        return _Matrix(shape[0] * shape[1], took)

    @cache
    def matrices(piece: Piece) -> list[_Matrix]:
        specs = (spec for layer in model.layers_of(piece) for spec in layer.parameters())
        return [matrix(spec.shape) for spec in specs if spec.group == "matrix" and not spec.frozen]

    stages = model.stages(layout)
    return [
        [each for stage in held for piece, count in stages[stage] for each in count * matrices(piece)]
        for held in stages_of_ranks(layout)
    ]


def _longest_queue(took: Iterable[float], holders: int) -> float:
    """Return the seconds of the rank with most, where the longest are dealt first."""
    loads = [0.0] * holders
    for each in sorted(took, reverse=True):
        heapq.heapreplace(loads, loads[0] + each)
    return max(loads)
