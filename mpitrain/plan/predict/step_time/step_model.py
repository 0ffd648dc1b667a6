"""A model as predictions of a step ask for it: its own layers, blocks that are alike as one kind."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from mpitrain.plan.declared.layer import Block, Layer, ModelLayers, work_of
from mpitrain.plan.declared.parameters import EXPERT, Shard
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedExperts, ResolvedModel
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.work import PartWork
from mpitrain.plan.division.stages import layer_counts
from mpitrain.plan.plan import Plan

Weights = tuple[int, int]  # numbers of dense weights and of experts' weights on a rank


class Piece(NamedTuple):
    """The layers [begin, end) of a block of a kind, or an end of the model: FIRST, LAST."""

    kind: int
    begin: int
    end: int


FIRST, LAST = Piece(-2, 0, 1), Piece(-1, 0, 1)  # embedding, head
Pieces = tuple[tuple[Piece, int], ...]  # of a stage, with how many it has of each


@dataclass(frozen=True, eq=False)
class StepModel:
    """A model whose step is predicted. config: resolved; its degrees don't matter. name: in messages."""

    config: ResolvedConfig
    layers: ModelLayers
    name: str

    @property
    def sizes(self) -> ResolvedModel:
        return self.config.model

    @property
    def experts(self) -> ResolvedExperts | None:
        """Its keys of the table `experts`; None: it has no experts."""
        return self.config.experts if self.config.experts.count else None

    @cached_property
    def kinds(self) -> tuple[Block, ...]:
        """The blocks that differ, in the order of their first ones."""
        return tuple(block for block, _ in self.layers.kinds)

    @property
    def blocks(self) -> tuple[int, ...]:
        """The number of each block's kind."""
        return self.layers.kind_of_block

    def layers_of(self, piece: Piece) -> tuple[Layer, ...]:
        """Return the layers of a piece."""
        if piece.kind < 0:
            return (self.layers.first if piece == FIRST else self.layers.last,)
        return self.kinds[piece.kind][piece.begin : piece.end]

    def stages(self, layout: StepLayout) -> tuple[Pieces, ...]:
        """Return the pieces of every stage, which a run's plan divides alike."""
        return _stages(self, layout.rank_of, layout.sequence, layout.stages)

    @cached_property
    def num_parameters(self) -> int:
        return sum(count * spec.numel for spec, count in self.layers.parameters())

    @cached_property
    def num_active(self) -> float:
        """Parameters that a token meets: of experts, its share."""
        return sum(count * spec.numel * spec.active for spec, count in self.layers.parameters())

    def flops_per_token(self, sequence: int, halved: bool = True) -> float:
        """Return the model FLOPs of a token in a training step.

        halved: what is masked of causal attention isn't counted (PaLM, arXiv:2204.02311, appendix
        B, counts all of it).
        """
        flops = self.layers.flops(sequence)
        return flops if halved else flops + self._masked_flops(sequence)

    def _masked_flops(self, sequence: int) -> float:
        """Return the FLOPs of a token that a causal mask leaves out of attention."""
        alone = StepLayout(1, sequence, 1, zero=0)
        works = works_of(self, alone, 1.0)
        counts = [count for _, count in self.layers.kinds]
        counted = [*zip(works.kinds, counts), ((works.last,), 1)]
        masked = (
            count * work.core.flops * work.core.length / (2 * sequence - work.core.length)
            for part, count in counted
            for work in part
            if work.core.flops
        )
        return 3 * sum(masked) / sequence


class ModelWork(NamedTuple):
    """The work of a model's parts: of the layers of each kind of block, and of its ends."""

    kinds: tuple[tuple[PartWork, ...], ...]
    first: PartWork
    last: PartWork

    def of(self, piece: Piece) -> tuple[PartWork, ...]:
        """Return the work of the layers of a piece."""
        if piece.kind < 0:
            return (self.first if piece == FIRST else self.last,)
        return self.kinds[piece.kind][piece.begin : piece.end]


def step_model(plan: Plan, name: str = "") -> StepModel:
    """Return the model of a plan. name: in messages; "": that of its preset."""
    return StepModel(plan.config, plan.model, name or plan.config.model.preset)


def of_microbatch(layout: StepLayout) -> StepLayout:
    """Return a layout with as few ranks and stages, whose microbatches are alike."""
    ranks = layout.tp * layout.cp * layout.etp * layout.ep
    return layout._replace(
        ranks=ranks, batch=layout.micro * ranks, pp=1, chunks=1, schedule="", stages=None, sharded=0, zero=0,
        reduce="step", gather="", offload_optimizer=False, longest=0,
    )  # fmt: skip


def works_of(model: StepModel, layout: StepLayout, load: float) -> ModelWork:
    """Return the work of a model's parts. load: rows of the rank whose experts have most, over the mean."""
    return _works_of(model, of_microbatch(layout), load)


@lru_cache(maxsize=4096)  # a search asks for many layouts that differ in their stages
def _works_of(model: StepModel, layout: StepLayout, load: float) -> ModelWork:
    width = model.sizes.width
    kinds = tuple(tuple(work_of(layer, layout, load, width) for layer in kind) for kind in model.kinds)
    ends = (work_of(layer, layout, load, width) for layer in (model.layers.first, model.layers.last))
    return ModelWork(kinds, *ends)


@lru_cache(maxsize=1024)
def weights_of(model: StepModel, piece: Piece, tp: int, ep: int, etp: int) -> Weights:
    """Return the weights of a piece on a rank, in numbers."""
    shard = Shard(0, tp, False, (0, ep), (0, etp))
    numbers = [0, 0]
    for layer in model.layers_of(piece):
        for spec in layer.parameters():
            numbers[spec.domain == EXPERT] += spec.on(shard).numel
    return numbers[0], numbers[1]


def tied_weights(model: StepModel, tp: int) -> int:
    """Return the weights that both ends of a model have in common, on a rank, in numbers."""
    names = {spec.name for spec in model.layers.last.parameters()}
    shard = Shard(0, tp)
    return sum(spec.on(shard).numel for spec in model.layers.first.parameters() if spec.name in names)


@lru_cache(maxsize=256)  # a search asks for many layouts with the same stages
def _stages(
    model: StepModel, rank_of: tuple[int, ...], sequence: int, given: tuple[float, ...] | None
) -> tuple[Pieces, ...]:
    counts = layer_counts(model.layers, rank_of, sequence, given)
    row = [(number, at) for number, kind in enumerate(model.blocks) for at in range(len(model.kinds[kind]))]
    stages: list[Counter[Piece]] = []
    for end, count in zip(accumulate(counts), counts):
        stages.append(Counter())
        for number, layers in groupby(row[end - count : end], lambda layer: layer[0]):
            places = [at for _, at in layers]
            stages[-1][Piece(model.blocks[number], places[0], places[-1] + 1)] += 1
    stages[0][FIRST] += 1
    stages[-1][LAST] += 1
    return tuple(tuple(pieces.items()) for pieces in stages)
