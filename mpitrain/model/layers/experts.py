"""A mixture of experts, after an RMSNorm: a router sends each token to a few of many gated
feed-forwards (arXiv:2006.16668, 2401.04088).

Kept of it, with n positions of the residual stream on this rank, width D, E experts of which a
token is sent to K, F hidden units of an expert, R rows that have come to this rank (at most
plan/settings/experts.py: rows_at_once; all n K of them without expert parallelism):

    n D + n, n D       unit of the norm, normed input
    n E, n K           logits and weights, in fp32 at least; experts of the tokens, and the order of
                       rows, n K of 8 bytes each
    R (D + 2 F / etp)  rows, gate, up;  R weights in fp32 at least
    4 n S              of S hidden units of shared experts (3 n S with run.compile; 2 n S, if what
                       is cheap to make again isn't kept)
    from I to W        R (2 D + 3 F / etp), n (2 D + 3 S): both factors of each weight gradient
    working            R (D + 2 F / etp), R (2 D + 4 F / etp), and 3 n D: forward, backward; or, if
                       that is more, rows on their way: 3 R D, R (4 D + 3 F / etp)

What comes in further rounds is sent again in the backward, and not kept. Shared experts and the
router are whole on every rank of tp, which has other positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from mpitrain.kernels.activation_functions import SILU, Activation
from mpitrain.plan.declared.expert_work import experts_work
from mpitrain.plan.declared.layer import Layer, Sizes, Working
from mpitrain.plan.declared.parameters import (
    COLUMNS,
    EPS,
    EXPERT,
    ROWS,
    Spec,
    bias,
    matrix,
    norm,
    residual_std,
    stack,
)
from mpitrain.plan.declared.resolved import ResolvedExperts as Settings
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import LOCAL, Started, Traffic
from mpitrain.plan.declared.work import PartWork
from mpitrain.plan.settings.dispatch import FP8, Dispatch, num_bytes
from mpitrain.plan.settings.experts import most_rows

if TYPE_CHECKING:
    from mpitrain.model.build_context import BuildContext
    from mpitrain.parallel.walk import Item
    from mpitrain.parallel.zero.parameters import Parameter


@dataclass(frozen=True)
class Experts(Layer):
    """settings: resolved.  depth, eps: as in layers/attention.py.  biased: router and experts are.
    activation, shared_activation: of experts, and of shared ones (kernels/activation_functions.py).

    It tells its losses, a token; the choices that were dropped; and, once they are counted over all
    ranks (optim/expert_bias.py), how unequal loads are.
    """

    metrics: ClassVar[tuple[str, ...]] = (
        "balance_loss",  # the router's loss for equal loads, with its weight
        "dropped",  # choices of experts that found no room (experts.capacity)
        "load_cv",  # coefficient of variation of the experts' loads, a mean over blocks
        "load_entropy",  # entropy of the experts' loads, 1 if all are equal, a mean over blocks
        "z_loss",  # the router's z-loss, with its weight
    )
    width: int
    settings: Settings
    depth: int
    eps: float = EPS
    biased: bool = False
    activation: Activation = SILU
    shared_activation: Activation = SILU

    @property
    def shared_width(self) -> int:
        """Hidden units of the shared experts, which are one feed-forward."""
        return self.settings.shared * self.settings.width

    @property
    def by_sequence(self) -> bool:
        """Whether loads are balanced within each sequence."""
        return self.settings.balance == "sequence" or (
            self.settings.balance == "bias" and self.settings.balance_weight > 0
        )

    def parameters(self) -> tuple[Spec, ...]:
        count, hidden, width = self.settings.count, self.settings.width, self.width
        std = residual_std(self.depth)
        active = self.settings.active / count
        specs = [
            *norm("ffn.norm", width, self.eps),
            matrix("ffn.router.weight", count, width, None),
            Spec("ffn.router.load", (count,), constant=1 / count, group="load"),
        ]
        if self.settings.balance == "bias":
            specs.append(Spec("ffn.router.bias", (count,), constant=0.0, group="bias"))
        for name in ("gate", "up"):
            specs.append(stack(f"ffn.experts.{name}.weight", count, hidden, width, ROWS, active=active))
        down = stack("ffn.experts.down.weight", count, width, hidden, COLUMNS, std=std, active=active)
        specs.append(down)
        if self.biased:
            specs.append(bias("ffn.router.logit_bias", count, None))
            # each rank that divides an expert adds the bias of other features: the sum has all
            own = dict(constant=0.0, divided=1, domain=EXPERT, active=active)
            for name, length in (("gate", hidden), ("up", hidden), ("down", width)):
                specs.append(Spec(f"ffn.experts.{name}.bias", (count, length), **own))
        if self.settings.shared:
            for name in ("gate", "up"):
                specs.append(matrix(f"ffn.shared.{name}.weight", self.shared_width, width, None))
            specs.append(matrix("ffn.shared.down.weight", width, self.shared_width, None, std=std))
        return tuple(specs)

    def kept(self, sizes: Sizes, segment: int) -> int:
        n, wide = sizes.shared, sizes.wide
        experts = self.settings
        rows = most_rows(sizes.config, sizes.segments)
        here = (self.width + 2 * experts.width // sizes.config.parallel.etp) * sizes.itemsize + wide
        routed = n * (experts.count * wide + experts.active * (2 * 8 + wide))
        routed += self._sums(sizes) if sizes.segments == 1 else 0
        of_shared = sizes.gated(sizes.itemsize, self.shared_activation == SILU) * n * self.shared_width
        return n * (self.width * sizes.itemsize + sizes.norm(self.width)) + routed + rows * here + of_shared

    def left(self, sizes: Sizes) -> int:
        rows = most_rows(sizes.config, sizes.segments)
        of_rows = rows * (2 * self.width + 3 * self.settings.width // sizes.config.parallel.etp)
        of_shared = sizes.shared * (2 * self.width + 3 * self.shared_width) if self.shared_width else 0
        # its gradient and the counts are made by I
        of_router = self.settings.count * (self.width * sizes.wide + 8)
        return (of_rows + of_shared) * sizes.itemsize + of_router

    def working(self, sizes: Sizes) -> Working:
        rows = most_rows(sizes.config, sizes.segments)
        hidden = self.settings.width // sizes.config.parallel.etp
        stream = sizes.stream(self.width)
        wide = sizes.wide
        of_shared = sizes.shared * self.shared_width * sizes.itemsize
        home = sizes.shared * self.settings.active * self.width * (sizes.itemsize + wide)
        compared = 2 * hidden * wide if sizes.itemsize < wide else 0  # for the gradient of weights
        returning = self._returning(sizes)
        entered = (2 * hidden + self.width) * sizes.itemsize
        forward = max(rows * max(entered, returning.forward), home, of_shared)
        differentiated = (4 * hidden + 2 * self.width) * sizes.itemsize + compared
        backward = max(rows * max(differentiated, returning.backward), home, 3 * of_shared)
        return Working(forward + 3 * stream, backward + 3 * stream)

    def _returning(self, sizes: Sizes) -> Working:
        """Return the bytes of a row on its way back to its token (parallel/expert/exchange.py).

        It is there as it was made, in the order of the ranks, and as it came back. In a backward
        its gradient and the factors of the weights' gradients stay meanwhile. Numbers of fp8 are
        fp32 where they arrive, and so are their scales and the products of both.
        """
        dispatch = Dispatch(sizes.config, sizes.segments)
        if dispatch.ranks == 1:
            return Working(0, 0)
        itemsize = sizes.itemsize
        forms = dispatch.forms(itemsize)
        row = self.width * itemsize
        rounded = row if forms.combine else 0
        sent = num_bytes(forms.combine, self.width, itemsize)
        factors = 3 * (self.settings.width // sizes.config.parallel.etp) * itemsize
        arriving = num_bytes(FP8, self.width, itemsize) + 12 * self.width if forms.dispatch == FP8 else 0
        backward = 2 * row + factors + 2 * sent + 3 * sizes.wide + rounded
        return Working(row + 2 * sent + rounded, max(backward, arriving))

    def history(self, sizes: Sizes) -> int:
        """Sums for the balance loss."""
        return self._sums(sizes)

    def _sums(self, sizes: Sizes) -> int:
        rows = sizes.config.batch.micro if self.by_sequence else 1
        return (2 * rows * self.settings.count + 2) * sizes.wide

    def traffic(self, sizes: Sizes) -> tuple[Traffic, ...]:
        """Counts, statistics for the losses, rows there and back."""
        rows = Dispatch(sizes.config, sizes.segments).traffic(self.width, sizes.itemsize)
        shared = sizes.tp * sizes.config.parallel.cp > 1
        statistics = (Started("all_reduce", "tokens", self._sums(sizes)),) if shared else ()
        return LOCAL, Traffic((*rows.forward[:1], *statistics, *rows.forward[1:]), rows.backward)

    def work(self, layout: StepLayout, load: float) -> PartWork:
        return experts_work(layout, self.width, self.settings, load, biased=self.biased)

    def items(self, own: Mapping[str, "Parameter"], site: "BuildContext") -> list["Item"]:
        from mpitrain.model.experts import ExpertMixture  # torch
        from mpitrain.model.segment import norm_segment
        from mpitrain.parallel.walk import Residual

        return [Residual([*norm_segment(own, "ffn.norm"), ExpertMixture(own, site, self)])]
