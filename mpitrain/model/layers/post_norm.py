"""A norm after a sublayer, before its output is added to the residual stream (post-norm: Gemma 2,
arXiv:2408.00118, section 2; OLMo 2, arXiv:2501.00656, section 3).

    x + norm(layer(x))    any layer whose items are one residual, with the norm that it has of its own

Kept of it besides, with n positions of the residual stream on this rank, width D: n D + n, unit and
factor of the norm, in every mode. Nothing is sent: it stands after what tp sums.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.plan.declared.layer import Layer, Sizes, Working, cache_bytes_of, work_of
from mpitrain.plan.declared.parameters import EPS, NormKind, Spec, norm
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import LOCAL, Traffic
from mpitrain.plan.declared.work import PartWork, with_norm

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class PostNorm(Layer):
    """layer: the sublayer.  width: of the residual stream.  kind: of the norm after.

    name: of its part of a block, `attention` or `ffn`; the norm is `name.post_norm.weight`.
    """

    layer: Layer
    name: str
    width: int
    eps: float = EPS
    kind: NormKind = NormKind.RMS

    @property
    def metrics(self) -> tuple[str, ...]:
        return self.layer.metrics

    @property
    def norm(self) -> str:
        return f"{self.name}.post_norm"

    def parameters(self) -> tuple[Spec, ...]:
        return *self.layer.parameters(), *norm(self.norm, self.width, self.eps, self.kind)

    def flops(self, sequence: int) -> float:
        return self.layer.flops(sequence)

    def kept(self, sizes: Sizes, segment: int) -> int:
        return self.layer.kept(sizes, segment) + sizes.shared * sizes.norm(self.width)

    def left(self, sizes: Sizes) -> int:
        return self.layer.left(sizes)

    def working(self, sizes: Sizes) -> Working:
        """The norm's share is no more than that of the norm before the layer."""
        return self.layer.working(sizes)

    def history(self, sizes: Sizes) -> int:
        return self.layer.history(sizes)

    def cache_bytes(self, positions: int, itemsize: int) -> int | None:
        return cache_bytes_of(self.layer, positions, itemsize)

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        norm_items = () if self.kind is NormKind.NONE else (LOCAL,)
        return *self.layer.traffic(sizes), *norm_items

    def work(self, layout: StepLayout, load: float) -> PartWork:
        work = work_of(self.layer, layout, load, self.width)
        return work if self.kind is NormKind.NONE else with_norm(work, layout, self.width)

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.segment import norm_segment  # torch
        from mpitrain.parallel.walk import Residual

        (residual,) = self.layer.items(own, site)
        return [Residual([*residual.items, *norm_segment(own, self.norm)])]
