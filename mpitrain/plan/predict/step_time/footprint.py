"""Bytes that a rank of each pipeline rank allocates, by formulas; the fullest one counts.

    state        bf16 weights 2, fp32 gradient 4, master and moments 12, divided by ZeRO
    activations  of a block, a position and its microbatches in flight: what its backward needs, after
                 arXiv:2205.05198, equations 1 to 4, from the shape's own widths
    logits       of the last stage: 16 bits, fp32 and their gradient
    gathered     whole weights of ZeRO-3, of two blocks

What an allocator reserves besides, and libraries' own buffers, are not in it: the back-test fits a
line where memory was published as reserved.
"""

from typing import NamedTuple

from mpitrain.plan.declared.published import ModelShape
from mpitrain.plan.predict.step_time.kept_bytes import attention_bytes, dense_bytes, expert_bytes, stash_bytes
from mpitrain.plan.predict.step_time.layout import StepLayout
from mpitrain.plan.predict.step_time.stage_seconds import (
    blocks_of_stages,
    fetches_each,
    stages_of_ranks,
    weights_of_stage,
)

STAYING = 4  # blocks whose activations are on their way to host memory, or back (model/offload.py)


class Footprint(NamedTuple):
    """Bytes of the fullest rank, and which pipeline rank that is."""

    weights: int
    gradients: int
    moments: int
    activations: int
    logits: int
    gathered: int
    stage: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.moments + self.activations + self.logits + self.gathered


def footprint_of(shape: ModelShape, layout: StepLayout, in_flight: list[int]) -> Footprint:
    """Return what the fullest rank holds. in_flight: stashes of a stage on each pipeline rank."""
    blocks = blocks_of_stages(shape, layout)
    found = [
        _of_rank(shape, layout, rank, held, blocks, in_flight[min(rank, len(in_flight) - 1)])
        for rank, held in enumerate(stages_of_ranks(layout))
    ]
    return max(found, key=lambda each: each.total)


def _of_rank(
    shape: ModelShape,
    layout: StepLayout,
    rank: int,
    held: list[int],
    blocks: list[tuple[int, int]],
    stashes: int,
) -> Footprint:
    last = len(blocks) - 1
    dense = experts = num_dense = num_sparse = 0
    for stage in held:
        of_dense, of_experts = weights_of_stage(shape, layout, blocks[stage], (stage == 0, stage == last))
        dense, experts = dense + of_dense, experts + of_experts
        num_dense, num_sparse = num_dense + blocks[stage][0], num_sparse + blocks[stage][1]
    shards, of_experts = layout.shards, layout.expert_shards
    owned = dense // shards + experts // of_experts
    whole = dense + experts
    weights = layout.item * (owned if layout.zero == 3 and fetches_each(layout) else whole)
    gradients = layout.gradient_bytes * (owned if layout.zero >= 2 and layout.sums_each else whole)
    gathered = 2 * layout.item * whole // max(1, num_dense + num_sparse) if fetches_each(layout) else 0
    per_stash = _mean_blocks(num_dense, len(held)), _mean_blocks(num_sparse, len(held))
    kept = stashes * stash_bytes(shape, layout, *per_stash)
    if layout.offload_activations:
        kept = min(kept, STAYING * stash_bytes(shape, layout, 1, 0))
    kept += _working(shape, layout)
    logits = _logits(shape, layout) if last in held else 0
    # AdamW's, and masters beside weights of 16 bits
    moments = 0 if layout.offload_optimizer else (12 if layout.item == 2 else 2 * layout.item) * owned
    return Footprint(weights, gradients, moments, kept, logits, gathered, rank)


def _mean_blocks(count: int, stages: int) -> float:
    return count / max(1, stages)


def _working(shape: ModelShape, layout: StepLayout) -> int:
    """Return the bytes of one block that is recomputed, or of what its backward works with."""
    whole = attention_bytes(shape, layout._replace(recompute="none"))
    whole += expert_bytes(shape, layout) if shape.experts else dense_bytes(shape, layout)
    return whole if layout.recompute == "full" else whole // 3


def _logits(shape: ModelShape, layout: StepLayout) -> int:
    vocab = -(-shape.vocab // layout.tp)
    return layout.positions * vocab * (6 if layout.fused else 10)
