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
    fetches_each,
    stages_of_ranks,
    stash_bytes,
    weights_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import LAST, Pieces, StepModel, Weights, works_of

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
    stages = model.stages(layout)
    held_by = [tuple(stages[stage] for stage in held) for held in stages_of_ranks(layout)]
    stashes = [in_flight[min(rank, len(in_flight) - 1)] for rank in range(len(held_by))]
    # of ranks whose stages are alike, the one with most stashes
    fullest: dict[tuple[Pieces, ...], int] = {}
    for rank, held in enumerate(held_by):
        if stashes[rank] > stashes[fullest.setdefault(held, rank)]:
            fullest[held] = rank
    weights, working = weights_of_ranks(model, layout), _working(model, layout)
    ranks = [
        _of_rank(model, layout, rank, weights[rank], held, stashes[rank], working)
        for held, rank in fullest.items()
    ]
    return max(ranks, key=lambda footprint: footprint.total)


def _of_rank(
    model: StepModel,
    layout: StepLayout,
    rank: int,
    weights_of_rank: Weights,
    held: Sequence[Pieces],
    stashes: int,
    working: int,
) -> Footprint:
    """Return what a rank holds. held: the pieces of its stages."""
    dense, experts = weights_of_rank
    owned = dense // layout.shards + experts // layout.expert_shards
    whole = dense + experts
    pieces = [pair for stage in held for pair in stage]
    blocks = sum(count for piece, count in pieces if piece.kind >= 0)
    weights = layout.item * (owned if layout.zero == 3 and fetches_each(layout) else whole)
    gradients = layout.gradient_bytes * (owned if layout.zero >= 2 and layout.sums_each else whole)
    gathered = 2 * layout.item * whole // max(1, blocks) if fetches_each(layout) else 0
    stash = {piece: stash_bytes(model, layout, piece) for piece, _ in pieces}
    kept = stashes * int(sum(count * stash[piece] for piece, count in pieces) / len(held))
    if layout.offload_activations:
        kept = min(kept, STAYING * max(stash.values()))
    kept += working
    # AdamW's, and masters beside weights of 16 bits
    moments = 0 if layout.offload_optimizer else (12 if layout.item == 2 else 2 * layout.item) * owned
    logits = works_of(model, layout, 1.0).last.kept * (LAST in stash)
    return Footprint(weights, gradients, moments, kept, logits, gathered, rank)


def _working(model: StepModel, layout: StepLayout) -> int:
    """Return the bytes of one block that is recomputed, or of what its backward works with."""
    works = works_of(model, layout._replace(recompute="none"), 1.0)
    whole = max(sum(work.kept for work in kind) for kind in works.kinds)
    return whole if layout.recompute == "full" else whole // 3
