"""The end of a model that predicts further tokens (multi-token prediction, DeepSeek-V3,
arXiv:2412.19437, section 2.2).

    h_0 = what comes from the blocks
    h_k = block_k(projection_k [ norm(h_k-1) | norm(embedding of token i + k) ])
    head(h_0) predicts token i + 1; the same head, after a norm of its own, on h_k: token i + 1 + k

Each depth k of `model.mtp` has one more block like the last one. The embedding is that of the first
stage: another use of the same weights, as if they were tied. Its cross-entropies, weighted, add to
what is trained; the loss that is reported is that of the next token.

Kept besides what its layers keep, with n positions of the residual stream on this rank, width D: 4
n D + 2 n of the two norms, and of their results side by side. Nothing of it is computed again,
whatever memory.recompute says.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from mpitrain.config import Memory
from mpitrain.model.layers.embedding_and_head import Embedding, Head
from mpitrain.plan.declared.layer import Layer, ModelLayers, Placed, Sizes, Working, work_of
from mpitrain.plan.declared.parameters import Spec, matrix
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import Traffic, in_one
from mpitrain.plan.declared.work import PartWork, Product, stream_bytes, together

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


def with_further_tokens(model: ModelLayers, num_tokens: int, weight: float) -> ModelLayers:
    """Return a model whose last layer predicts `num_tokens` more. weight: of their mean loss."""
    first = replace(model.first, tied=True)
    last = MultiToken(first, model.blocks[-1], model.last, num_tokens, weight)
    return ModelLayers(first, model.blocks, last)


@dataclass(frozen=True)
class MultiToken(Layer):
    """embedding, head: those of the model.  block: the layers of each of the further `depths`.
    weight: of their mean loss.
    """

    embedding: Embedding
    block: tuple[Layer, ...]
    head: Head
    depths: int
    weight: float

    @property
    def metrics(self) -> tuple[str, ...]:
        return (
            "mtp_loss",  # loss of the further tokens (model.mtp), without its weight
            *(name for layer in self.block for name in layer.metrics),
        )

    @property
    def prefixes(self) -> list[str]:
        """What the names of each depth's parameters begin with."""
        return [f"mtp.{depth}." for depth in range(self.depths)]

    def parameters(self) -> tuple[Spec, ...]:
        specs = [*self.head.parameters(), *self.embedding.parameters()]
        width = self.head.width
        for prefix in self.prefixes:
            for name in ("hidden_norm", "token_norm", "head_norm"):
                specs += self.head.norm(f"{prefix}{name}")
            specs.append(matrix(f"{prefix}projection.weight", width, 2 * width, None))
            for layer in self.block:
                specs += Placed(layer, prefix).parameters()
        return tuple({spec.name: spec for spec in specs}.values())  # tied ones once

    def flops(self, sequence: int) -> float:
        block = sum(layer.flops(sequence) for layer in self.block)
        further = 12.0 * self.head.width**2 + self.head.flops(sequence) + block
        return self.head.flops(sequence) + self.depths * further

    def kept(self, sizes: Sizes, segment: int) -> int:
        all_kept = _all_kept(sizes)
        joined = 2 * sizes.shared * (self.head.width * sizes.itemsize + sizes.norm(self.head.width))
        block = sum(layer.kept(all_kept, segment) for layer in self.block)
        further = self.embedding.kept(sizes, segment) + joined + block
        return (1 + self.depths) * self.head.kept(sizes, segment) + self.depths * further

    def left(self, sizes: Sizes) -> int:
        block = sum(layer.left(sizes) for layer in self.block)
        further = 3 * self.head.width * sizes.shared * sizes.itemsize + block
        if self.head.tied:  # gradients of rows, and which these are
            further += (self.head.width * sizes.itemsize + 8) * sizes.positions
        return (1 + self.depths) * self.head.left(sizes) + self.depths * further

    def working(self, sizes: Sizes) -> Working:
        layer_bytes = [layer.working(_all_kept(sizes)) for layer in (self.head, *self.block)]
        stream = 3 * sizes.stream(self.head.width)
        return Working(*(max(numbers) + stream for numbers in zip(*layer_bytes)))

    def history(self, sizes: Sizes) -> int:
        return self.depths * sum(layer.history(sizes) for layer in self.block)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        """The head, then of each depth lookup, block and head, in one item."""
        head = self.head.traffic(sizes)
        block = (exchange for layer in self.block for exchange in layer.traffic(sizes))
        depth = *self.embedding.traffic(sizes), *block, *head
        return (in_one((*head, *self.depths * depth)),)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        """The head, and of each depth lookup, projection, block and head, without recomputation."""
        whole = layout._replace(recompute="none")
        width = self.head.width
        projection = Product(layout.stream_positions, width, 2 * width)
        joined = PartWork((projection,), pass_bytes=8 * stream_bytes(layout, width), kernels=8)
        block = [work_of(layer, whole, load, width) for layer in self.block]
        head = self.head.work(layout, load)
        return together([head, *self.depths * [self.embedding.work(layout, load), joined, *block, head]])

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.multi_token import Depth, Join, MultiTokenHead  # torch

        lookup = self.embedding.items(own, site)
        depths = []
        for prefix in self.prefixes:
            here = {name.removeprefix(prefix): own[name] for name in own if name.startswith(prefix)}
            join = Join(here["hidden_norm.weight"], here["token_norm.weight"], here["projection.weight"])
            block = [item for layer in self.block for item in layer.items(here, site)]
            head = self.head.items(own, site, f"{prefix}head_norm")
            depths.append(Depth(lookup, join, block, head))
        return [MultiTokenHead(self.head.items(own, site), depths, self.weight / self.depths, site)]


def _all_kept(sizes: Sizes) -> Sizes:
    """Return the sizes without recomputation, which isn't done here."""
    return replace(sizes, config=msgspec.structs.replace(sizes.config, memory=Memory()))
