"""A model as predictions of a step ask for it: its own layers, blocks that are alike as one kind."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from mpitrain.plan.declared.layer import Block, Layer, ModelLayers, work_of
from mpitrain.plan.declared.parameters import EXPERT, Shard
from mpitrain.plan.declared.resolved import ResolvedConfig, ResolvedExperts, ResolvedModel
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.work import PartWork
from mpitrain.plan.plan import Plan

Weights = tuple[int, int]  # numbers of dense weights and of experts' weights on a rank


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

    @cached_property
    def has_experts(self) -> tuple[bool, ...]:
        """Whether the blocks of each kind have experts."""
        return tuple(
            any(spec.domain == EXPERT for layer in kind for spec in layer.parameters()) for kind in self.kinds
        )

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

    def weights_of(self, layout: StepLayout, counts: Sequence[int], ends: tuple[bool, bool]) -> Weights:
        """Return the weights of some blocks on a rank, in numbers.

        counts: of blocks, by kind. ends: whether the embedding, and the head, are among them.
        """
        weights = _weights(self, layout.tp, layout.ep, layout.etp)
        parts = [*zip(counts, weights.kinds), (ends[0], weights.first), (ends[1], weights.last)]
        dense, experts = (sum(count * numbers[which] for count, numbers in parts) for which in (0, 1))
        return dense - weights.tied * all(ends), experts

    def end_weights(self, layout: StepLayout) -> tuple[Weights, Weights]:
        """Return the weights of the embedding and of the head on a rank, in numbers."""
        weights = _weights(self, layout.tp, layout.ep, layout.etp)
        return weights.first, weights.last


class ModelWork(NamedTuple):
    """The work of a model's parts: of the layers of each kind of block, and of its ends."""

    kinds: tuple[tuple[PartWork, ...], ...]
    first: PartWork
    last: PartWork


def step_model(plan: Plan, name: str = "") -> StepModel:
    """Return the model of a plan. name: in messages; "": that of its preset."""
    return StepModel(plan.config, plan.model, name or plan.config.model.preset)


def of_microbatch(layout: StepLayout) -> StepLayout:
    """Return a layout with as few ranks and stages, whose microbatches are alike."""
    ranks = layout.tp * layout.cp * layout.etp * layout.ep
    return layout._replace(
        ranks=ranks, batch=layout.micro * ranks, pp=1, chunks=1, schedule="", sharded=0, zero=0,
        gather="", offload_optimizer=False,
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


class _RankWeights(NamedTuple):
    """Of each kind of block, of both ends; tied: what these have in common."""

    kinds: tuple[Weights, ...]
    first: Weights
    last: Weights
    tied: int


@lru_cache(maxsize=256)
def _weights(model: StepModel, tp: int, ep: int, etp: int) -> _RankWeights:
    shard = Shard(0, tp, False, (0, ep), (0, etp))

    def of_layers(layers: Sequence[Layer]) -> Weights:
        numbers = [0, 0]
        for layer in layers:
            for spec in layer.parameters():
                numbers[spec.domain == EXPERT] += spec.on(shard).numel
        return numbers[0], numbers[1]

    first, last = model.layers.first, model.layers.last
    names = {spec.name for spec in last.parameters()}
    tied = sum(spec.on(shard).numel for spec in first.parameters() if spec.name in names)
    kinds = tuple(of_layers(kind) for kind in model.kinds)
    return _RankWeights(kinds, of_layers((first,)), of_layers((last,)), tied)
