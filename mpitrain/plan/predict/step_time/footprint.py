"""Bytes that a rank of each pipeline rank allocates, by formulas; the one with most counts.

    state        bf16 weights 2, fp32 gradient 4, master and moments 12, divided by ZeRO
    activations  of a block, a position and its microbatches in flight: what its backward needs, after
                 arXiv:2205.05198, equations 1 to 4, from the layers' own widths
    logits       of the last stage: 16 bits, fp32 and their gradient
    gathered     whole weights of ZeRO-3, of two blocks

What an allocator reserves besides, and libraries' own buffers, are not in it: the back-test fits a
line where memory was published as reserved.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.stage_seconds import (
    blocks_of_stages,
    fetches_each,
    stages_of_ranks,
    stash_bytes,
    weights_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import StepModel, Weights, works_of

STAYING = 4  # blocks whose activations are on their way to host memory, or back (model/offload.py)


class Footprint(NamedTuple):
    """Bytes of the rank with most memory, and which pipeline rank that is."""

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


@lru_cache(maxsize=4)  # a search asks whether a layout fits, and then for its step
def footprint_of(model: StepModel, layout: StepLayout, in_flight: tuple[int, ...]) -> Footprint:
    """Return what the rank with most memory holds. in_flight: stashes of a stage on each pipeline rank."""
    blocks = blocks_of_stages(model, layout)
    held_by = stages_of_ranks(layout)
    stashes = [in_flight[min(rank, len(in_flight) - 1)] for rank in range(len(held_by))]
    fullest: dict[tuple[object, ...], int] = {}  # of ranks whose stages are alike, the one with most stashes
    for rank, held in enumerate(held_by):
        alike = tuple((blocks[stage], stage == 0, stage == len(blocks) - 1) for stage in held)
        if stashes[rank] > stashes[fullest.setdefault(alike, rank)]:
            fullest[alike] = rank
    weights, of_block = weights_of_ranks(model, layout), stash_bytes(model, layout)
    logits = works_of(model, layout, 1.0).last.kept
    working = _working(model, layout)
    ranks = [
        _of_rank(
            layout,
            rank,
            weights[rank],
            [blocks[stage] for stage in held_by[rank]],
            of_block,
            stashes[rank],
            working,
            logits * (len(blocks) - 1 in held_by[rank]),
        )
        for rank in fullest.values()
    ]
    return max(ranks, key=lambda footprint: footprint.total)


def _of_rank(
    layout: StepLayout,
    rank: int,
    weights_of_rank: Weights,
    blocks: Sequence[tuple[int, ...]],
    of_block: Sequence[int],
    stashes: int,
    working: int,
    logits: int,
) -> Footprint:
    """Return what a rank holds.

    blocks: of its stages, by kind. of_block: bytes that a microbatch leaves in a block of each kind.
    """
    dense, experts = weights_of_rank
    owned = dense // layout.shards + experts // layout.expert_shards
    whole = dense + experts
    counts = [sum(numbers) for numbers in zip(*blocks)]
    weights = layout.item * (owned if layout.zero == 3 and fetches_each(layout) else whole)
    gradients = layout.gradient_bytes * (owned if layout.zero >= 2 and layout.sums_each else whole)
    gathered = 2 * layout.item * whole // max(1, sum(counts)) if fetches_each(layout) else 0
    kept = stashes * int(sum(count * each for count, each in zip(counts, of_block)) / len(blocks))
    if layout.offload_activations:
        kept = min(kept, STAYING * max(of_block))
    kept += working
    # AdamW's, and masters beside weights of 16 bits
    moments = 0 if layout.offload_optimizer else (12 if layout.item == 2 else 2 * layout.item) * owned
    return Footprint(weights, gradients, moments, kept, logits, gathered, rank)


def _working(model: StepModel, layout: StepLayout) -> int:
    """Return the bytes of one block that is recomputed, or of what its backward works with."""
    works = works_of(model, layout._replace(recompute="none"), 1.0)
    whole = max(sum(work.kept for work in kind) for kind in works.kinds)
    return whole if layout.recompute == "full" else whole // 3
