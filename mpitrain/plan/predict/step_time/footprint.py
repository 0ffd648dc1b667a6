"""Bytes that a rank of each pipeline rank allocates, by formulas; the one with most counts.

    state        bf16 weights 2, fp32 gradient 4, master and moments 12, divided by ZeRO
    activations  of a block, a position and its microbatches in flight: what its backward needs, after
                 arXiv:2205.05198, equations 1 to 4, from the layers' own widths
    logits       of the last stage: 16 bits, fp32 and their gradient
    gathered     whole weights of ZeRO-3, of two blocks

What an allocator reserves besides, and libraries' own buffers, are not in it: the back-test fits a
line where memory was published as reserved.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.stage_seconds import (
    division_alone,
    fetches_each,
    stages_of_ranks,
    stash_bytes,
    weights_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import (
    LAST,
    Piece,
    Pieces,
    StepModel,
    Weights,
    of_microbatch,
    works_of,
)

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


class RankStages(NamedTuple):
    """Stages of a pipeline rank. stashes: held at most, of one stage each. blocks: or their parts."""

    rank: int
    weights: Weights
    pieces: Pieces
    stages: int
    stashes: int
    blocks: int


class PieceBytes(NamedTuple):
    """What one microbatch takes of a rank.

    stash: what it leaves in a piece; the ends' isn't counted.
    working: of one block that is recomputed, or what its backward works with.
    """

    stash: Mapping[Piece, int]
    working: int
    logits: int


def footprint_of(model: StepModel, layout: StepLayout, in_flight: tuple[int, ...]) -> Footprint:
    """Return what the rank with most memory holds. in_flight: stashes of a stage by pipeline rank."""
    ranks = _of_ranks(model, layout._replace(offload_optimizer=False), in_flight)
    if layout.offload_optimizer:
        ranks = [footprint._replace(moments=0) for footprint in ranks]
    return max(ranks, key=lambda footprint: footprint.total)


@lru_cache(maxsize=4)  # a search asks whether a layout fits, with offload, too, and for its step
def _of_ranks(model: StepModel, layout: StepLayout, in_flight: tuple[int, ...]) -> list[Footprint]:
    ranks = _unlike_ranks(model, division_alone(layout), in_flight)
    pieces = frozenset(piece for rank in ranks for piece, _ in rank.pieces)
    of_pieces = _of_pieces(model, of_microbatch(layout), pieces)
    return [_of_rank(layout, rank, of_pieces) for rank in ranks]


@lru_cache(maxsize=256)  # a search asks for many layouts that divide a model alike
def _unlike_ranks(model: StepModel, division: StepLayout, in_flight: tuple[int, ...]) -> list[RankStages]:
    """Return pipeline ranks whose stages differ; of those that are alike, the one with most stashes."""
    stages, weights = model.stages(division), weights_of_ranks(model, division)
    fullest: dict[tuple[Pieces, ...], RankStages] = {}
    for rank, numbers in enumerate(stages_of_ranks(division)):
        held = tuple(stages[stage] for stage in numbers)
        pieces = tuple(pair for stage in held for pair in stage)
        blocks = sum(count for piece, count in pieces if piece.kind >= 0)
        stashes = in_flight[min(rank, len(in_flight) - 1)]
        if held not in fullest or stashes > fullest[held].stashes:
            fullest[held] = RankStages(rank, weights[rank], pieces, len(held), stashes, blocks)
    return [*fullest.values()]


@lru_cache(maxsize=4096)
def _of_pieces(model: StepModel, layout: StepLayout, pieces: frozenset[Piece]) -> PieceBytes:
    works, width = works_of(model, layout, 1.0), model.sizes.width
    stash = {piece: stash_bytes(layout, works.of(piece), width) if piece.kind >= 0 else 0 for piece in pieces}
    whole = works if layout.recompute == "none" else works_of(model, layout._replace(recompute="none"), 1.0)
    working = max(sum(work.kept for work in kind) for kind in whole.kinds)
    return PieceBytes(stash, working if layout.recompute == "full" else working // 3, works.last.kept)


def _of_rank(layout: StepLayout, held: RankStages, of_pieces: PieceBytes) -> Footprint:
    dense, experts = held.weights
    owned = dense // layout.shards + experts // layout.expert_shards
    whole = dense + experts
    fetches, item = fetches_each(layout), layout.item
    weights = item * (owned if layout.zero == 3 and fetches else whole)
    gradients = layout.gradient_bytes * (owned if layout.zero >= 2 and layout.sums_each else whole)
    gathered = 2 * item * whole // max(1, held.blocks) if fetches else 0
    stash = of_pieces.stash
    kept = held.stashes * int(sum(count * stash[piece] for piece, count in held.pieces) / held.stages)
    if layout.offload_activations:
        kept = min(kept, STAYING * max(stash[piece] for piece, _ in held.pieces))
    kept += of_pieces.working
    # AdamW's, and masters beside weights of 16 bits
    moments = (12 if item == 2 else 2 * item) * owned
    logits = of_pieces.logits * any(piece == LAST for piece, _ in held.pieces)
    return Footprint(weights, gradients, moments, kept, logits, gathered, held.rank)
