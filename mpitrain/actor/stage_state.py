"""The parameters of one stage, its weights and gradients in buckets."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from mpitrain.kernels.precision import TYPES, rounds_products
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.parallel.zero.shards import Gradient, Weights, ZeroGroup
from mpitrain.parallel.zero.tree_accumulation import TreeGradient
from mpitrain.plan.declared.parameters import Shard, Spec
from mpitrain.plan.division.buckets import BucketPlan, map_bucket
from mpitrain.plan.division.domains import COUNTED
from mpitrain.plan.division.stages import StagePlan


@dataclass
class BucketState:
    """Parameters that are stored, reduced and fetched together.

    gradients: of a tied embedding one for each use in this stage.
    owned: whether its weights belong to this stage; only a tied embedding's can be another's.
    """

    plan: BucketPlan
    weights: Weights
    gradients: list[Gradient]
    owned: bool


class StageState:
    """What a stage of a model is made of and adds to. by_block: its parameters, as its blocks see them.

    zero_groups: how the state of each domain is divided; without, this rank has everything.
    embedding: the tied one's weights; given, if another stage of this rank has it and shares it.
    training: without, gradients are on torch's device meta: they have sizes, and no memory.
    """

    def __init__(
        self,
        stage: StagePlan,
        shard: Shard,
        device: torch.device,
        zero_groups: Mapping[str, ZeroGroup] | None = None,
        embedding: Weights | None = None,
        training: bool = True,
    ):
        config = stage.config
        self._training = training
        self.embedding = embedding
        rounded = rounds_products(config.precision, device)
        self.by_block = [[Parameter(spec, rounded=rounded) for spec in block] for block in stage.specs(shard)]
        self.buckets: list[BucketState] = []
        for plan in stage.buckets(shard):
            zero_group = zero_groups[plan.domain] if zero_groups else ZeroGroup(exact=plan.domain == COUNTED)
            bucket = self._make_bucket(stage, plan, zero_group, device)
            self.buckets.append(bucket)
            if plan.tied:
                self.embedding = bucket.weights
        parts = range(len(stage.parts))
        # by part of the backward
        self.weights_of = [[b.weights for b in self.buckets if number in b.plan.parts] for number in parts]

    def _make_bucket(
        self, stage: StagePlan, plan: BucketPlan, zero_group: ZeroGroup, device: torch.device
    ) -> BucketState:
        """Allocate a bucket's weights and gradients, and bind its parameters to them.

        Collective over the ranks of its domain, which allocate in one order.
        """
        config = stage.config
        mapped = map_bucket(plan.specs, zero_group.size)
        shared = self.embedding if plan.tied else None
        dtype = zero_group.type_of_weights(TYPES[config.precision.compute])
        # with model.init others are read before the first step
        seed = None if config.model.init else config.run.seed
        weights = shared or Weights(mapped, dtype, device, zero_group, seed, masters=self._training)
        users = self._users(stage, plan)
        for parameter in users:
            weights.bind(parameter)
        uses = [[parameter] for parameter in users] if plan.tied else [users]
        gradient_type = TreeGradient if zero_group.division.in_tree else Gradient
        place = device if self._training else torch.device("meta")
        gradients = [gradient_type(mapped, weights.master.dtype, place, zero_group) for _ in uses]
        for gradient, parameters in zip(gradients, uses):
            for parameter in parameters:
                gradient.bind(parameter)
        return BucketState(plan, weights, gradients, owned=shared is None)

    def _users(self, stage: StagePlan, plan: BucketPlan) -> list[Parameter]:
        """Return the parameters of a bucket, block by block; a tied embedding once for each use."""
        names = {spec.name for spec in plan.specs}
        part_of = {block: number for number, part in enumerate(stage.parts) for block in part}
        return [
            parameter
            for number, block in enumerate(self.by_block)
            for parameter in block
            if parameter.spec.name in names and part_of[number] in plan.parts
        ]

    def weights(self) -> Iterator[tuple[Spec, torch.Tensor]]:
        """Yield every parameter of this stage once, as it computes with it."""
        for bucket in self.buckets:
            yield from bucket.weights.views()

    def zero_grad(self) -> None:
        """Start a step."""
        for bucket in self.buckets:
            for gradient in bucket.gradients:
                gradient.zero()
