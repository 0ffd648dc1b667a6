"""Which layers each stage of a model has, and which blocks are recomputed, reduced and fetched together.

Integers only.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate, groupby

from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.layer import Layer, ModelLayers, Placed
from mpitrain.plan.declared.parameters import WHOLE, Shard, Spec
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.division.buckets import BucketPlan, buckets_of, parts_of
from mpitrain.plan.division.stage_balance import balanced_split
from mpitrain.schedules.lowering.reductions import Reduction


@dataclass(frozen=True)
class StagePlan:
    """Stage `index` of a model.

    Its first and last block can be part of one, of which another stage has the rest.

    blocks: in forward order. copies: of the model, in the pipeline.
    groups: runs of `every` blocks that are recomputed together.
    parts: of the backward, runs of blocks too.
    """

    config: ResolvedConfig
    index: int
    first: bool
    last: bool
    blocks: tuple[tuple[Placed, ...], ...]
    copies: int = 1
    every: int = 1

    def shard(self, rank: int, expert_rank: int = 0) -> Shard:
        """Return what a rank of the tensor-parallel axis has. expert_rank: of the axis `experts`."""
        parallel = self.config.parallel
        dense = Shard(rank, parallel.tp, parallel.sequence) if parallel.tp > 1 else WHOLE
        part, hidden = divmod(expert_rank, parallel.etp)
        return replace(dense, experts=(part, parallel.ep), hidden=(hidden, parallel.etp))

    def specs(self, shard: Shard = WHOLE) -> list[list[Spec]]:
        """Return the parameters of each block, made once for each shard: leave the lists as they are."""
        if shard not in self._specs:
            self._specs[shard] = [
                [self._frozen(spec).on(shard) for placed in block for spec in placed.parameters()]
                for block in self.blocks
            ]
        return self._specs[shard]

    def _frozen(self, spec: Spec) -> Spec:
        frozen = any(fnmatchcase(spec.name, pattern) for pattern in self.config.optimizer.frozen)
        return replace(spec, frozen=True) if frozen else spec

    @cached_property
    def _specs(self) -> dict[Shard, list[list[Spec]]]:
        return {}

    def largest_of(self, layer: Layer) -> int:
        """Return how many numbers the largest parameter of a layer of this stage has on a rank."""
        if id(layer) not in self._largest:
            shard = self.shard(0)
            self._largest[id(layer)] = max((spec.on(shard).numel for spec in layer.parameters()), default=0)
        return self._largest[id(layer)]

    @cached_property
    def _largest(self) -> dict[int, int]:
        return {}  # by the id of a layer, which this stage holds

    @property
    def work(self) -> float:
        """The multiplications of a token's forward in the blocks, without the ends of the model."""
        sequence = self.config.data.sequence
        blocks = (self.blocks[number] for number in self.inner)
        return sum(placed.layer.flops(sequence) for block in blocks for placed in block) / 6

    @property
    def inner(self) -> range:
        """The blocks without the ends of the model."""
        return range(self.first, len(self.blocks) - self.last)

    @cached_property
    def groups(self) -> list[range]:
        """With ZeRO-3 a group is one block: weights are fetched and dropped block by block."""
        if self.config.memory.recompute not in ("full", "every-k"):
            return []
        return [self.inner[i : i + self.every] for i in range(0, len(self.inner), self.every)]

    @cached_property
    def parts(self) -> list[range]:
        """From the last block to the first; the same on all ranks."""
        joined = {block for group in self.groups for block in group[1:]}  # each with the one before it
        return parts_of(self.config, self.specs(self.shard(0)), joined)

    def buckets(self, shard: Shard = WHOLE) -> list[BucketPlan]:
        """Return what is stored, reduced and fetched together, made once for each shard."""
        if shard not in self._buckets:
            self._buckets[shard] = buckets_of(self.config, self.specs(shard), self.parts, self.copies)
        return self._buckets[shard]

    @cached_property
    def _buckets(self) -> dict[Shard, list[BucketPlan]]:
        return {}

    @cached_property
    def reduction(self) -> Reduction:
        """Tell the schedule when each bucket is complete, and over which axes it is summed."""
        ready, over, then = zip(*((max(b.parts), b.over, b.then) for b in self.buckets(self.shard(0))))
        return Reduction(len(self.parts), ready, over, then)

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """Tell the schedule which buckets each part of the backward needs."""
        buckets = self.buckets(self.shard(0))
        return tuple(
            tuple(number for number, b in enumerate(buckets) if part in b.parts)
            for part in range(len(self.parts))
        )


def stages_of(
    config: ResolvedConfig, model: ModelLayers, rank_of: tuple[int, ...], copies: int
) -> tuple[StagePlan, ...]:
    """Divide a model's layers over stages: as configured, or balanced.

    rank_of: the pipeline rank of each stage of one copy.
    """
    row = model.row()
    last = len(rank_of) - 1
    counts = layer_counts(model, rank_of, config.data.sequence, config.pipeline.stages)
    stages = []
    for index, (end, count) in enumerate(zip(accumulate(counts), counts)):
        blocks = [
            tuple(placed for _, placed in numbered_layers)
            for _, numbered_layers in groupby(row[end - count : end], lambda numbered: numbered[0])
        ]
        if index == 0:
            blocks.insert(0, (model.ends[0],))
        if index == last:
            blocks.append((model.ends[1],))
        stages.append(StagePlan(config, index, index == 0, index == last, tuple(blocks), copies))
    return tuple(stages)


def layer_counts(
    model: ModelLayers, rank_of: tuple[int, ...], sequence: int, given: Sequence[float] | None
) -> list[int]:
    """Return how many of the layers between a model's ends each stage has.

    given: pipeline.stages; None: balanced by FLOPs per token, of products with weights, and of
    scores and values in causal attention.
    """
    if given is not None:
        return _configured(given, model)
    flops = {id(layer): layer.flops(sequence) for block in model.blocks for layer in block}
    row = tuple(flops[id(layer)] for block in model.blocks for layer in block)
    return balanced_split(row, rank_of, model.last.flops(sequence))


def _configured(stages: Sequence[float], model: ModelLayers) -> list[int]:
    """Turn blocks per stage, which can be halves, into layers."""
    begins = [0, *accumulate(len(block) for block in model.blocks)]
    ends = []
    for end in accumulate(stages):
        whole = int(end)
        within = end - int(end)
        at = begins[whole] + (within * len(model.blocks[whole]) if within else 0)
        if at != int(at):
            raise ConfigError(
                f"pipeline.stages = {stages}: found half of block {whole}, which has "
                f"{counted(len(model.blocks[whole]), 'layers')}; end a stage after a whole block"
            )
        ends.append(int(at))
    return [end - begin for begin, end in zip([0, *ends], ends)]
