"""Bytes that a rank of each pipeline rank allocates, by formulas; the one with most counts.

    state        bf16 weights 2, fp32 gradient 4, master and moments 12, divided by ZeRO
    activations  of a block, a position and its microbatches in flight: what its backward needs, after
                 arXiv:2205.05198, equations 1 to 4, from the layers' own widths
    logits       of the last stage: 16 bits, fp32 and their gradient
    gathered     whole weights of ZeRO-3, of two blocks

What an allocator reserves besides, and libraries' own buffers, are not in it: the back-test fits a
line where memory was published as reserved.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.stage_seconds import (
    fetches_each,
    stages_of_ranks,
    stash_bytes,
    weights_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import LAST, Piece, Pieces, StepModel, Weights, works_of

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
    weights, pieces = weights_of_ranks(model, layout), _of_pieces(model, layout, fullest)
    ranks = [
        _of_rank(layout, rank, weights[rank], held, stashes[rank], pieces) for held, rank in fullest.items()
    ]
    return max(ranks, key=lambda footprint: footprint.total)


class PieceBytes(NamedTuple):
    """What one microbatch takes of a rank.

    stash: what it leaves in a piece; the ends' isn't counted.
    working: of one block that is recomputed, or what its backward works with.
    """

    stash: Mapping[Piece, int]
    working: int
    logits: int


def _of_pieces(model: StepModel, layout: StepLayout, ranks: Iterable[Sequence[Pieces]]) -> PieceBytes:
    """Return what a microbatch takes of each piece. ranks: the pieces of their stages."""
    works, width = works_of(model, layout, 1.0), model.sizes.width
    pieces = {piece for held in ranks for stage in held for piece, _ in stage}
    stash = {piece: stash_bytes(layout, works.of(piece), width) if piece.kind >= 0 else 0 for piece in pieces}
    whole = works if layout.recompute == "none" else works_of(model, layout._replace(recompute="none"), 1.0)
    working = max(sum(work.kept for work in kind) for kind in whole.kinds)
    return PieceBytes(stash, working if layout.recompute == "full" else working // 3, works.last.kept)


def _of_rank(
    layout: StepLayout,
    rank: int,
    weights_of_rank: Weights,
    held: Sequence[Pieces],
    stashes: int,
    of_pieces: PieceBytes,
) -> Footprint:
    """Return what a rank holds. held: the pieces of its stages."""
    dense, experts = weights_of_rank
    owned = dense // layout.shards + experts // layout.expert_shards
    whole = dense + experts
    fetches, item = fetches_each(layout), layout.item
    pieces = [pair for stage in held for pair in stage]
    blocks = sum(count for piece, count in pieces if piece.kind >= 0)
    weights = item * (owned if layout.zero == 3 and fetches else whole)
    gradients = layout.gradient_bytes * (owned if layout.zero >= 2 and layout.sums_each else whole)
    gathered = 2 * item * whole // max(1, blocks) if fetches else 0
    stash = of_pieces.stash
    kept = stashes * int(sum(count * stash[piece] for piece, count in pieces) / len(held))
    if layout.offload_activations:
        kept = min(kept, STAYING * max(stash[piece] for piece, _ in pieces))
    kept += of_pieces.working
    # AdamW's, and masters beside weights of 16 bits
    moments = 0 if layout.offload_optimizer else (12 if item == 2 else 2 * item) * owned
    logits = of_pieces.logits * any(piece == LAST for piece, _ in pieces)
    return Footprint(weights, gradients, moments, kept, logits, gathered, rank)
