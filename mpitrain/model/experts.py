"""What computes a mixture of experts: a router, an exchange in rounds, grouped products, and shared
experts meanwhile.

    forward   route | counts | send rows  |  shared experts  | experts | send back | add up
    backward          send gradients      |  shared experts  | experts | send back | add up | route

B sequences of a microbatch, n positions of them on this rank, D width, E experts, K of them for a
token, R rows that have come here, F hidden units of an expert. A row is the token's activation, and
after it the weight that the router gives it: the expert weighs what it makes before its last
product, so that nobody has to keep the results of all experts for the gradient of the weights. By
which ways rows travel, and which of them in one round, the exchange knows (parallel/expert/).
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from mpitrain.comm.collectives import all_reduce
from mpitrain.kernels.grouped import add_sums, grouped_product, row_vectors
from mpitrain.kernels.precision import wide
from mpitrain.model import router
from mpitrain.model.build_context import BuildContext
from mpitrain.model.feed_forward import FeedForwardSegment
from mpitrain.model.linear import GroupedProduct
from mpitrain.parallel.expert.exchange import Choices, CombinedRows, DispatchedRows, DispatchRounds, Flat
from mpitrain.parallel.expert.hierarchical import Hierarchical
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Addend, Begun, Later, Walk, WeightGradients, run
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.plan.settings.dispatch import Dispatch


class ExpertRows(NamedTuple):
    """Rows of a rank's experts, in their order: x [R, D], weights [R, 1], gate and up [R, F]."""

    x: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    loads: list[int]


class SavedMixture(NamedTuple):
    """What the backward needs of a microbatch.

    rounds: in which its rows travelled.
    rows: those of the first round.
    sums: vectors of router.Statistics, of each segment of the microbatch; all are there when the
    first backward begins.
    """

    x: torch.Tensor
    chosen: router.Chosen
    sums: list[torch.Tensor]
    rounds: DispatchRounds
    rows: ExpertRows
    of_shared: tuple | None
    scale: float


class ExpertMixture:
    """The mixture, without norm and residual.

    Collective over the axis of the experts, and over the ranks with the same sequences.
    layer: the Experts that are computed (model/layers/experts.py).
    """

    def __init__(self, own: Mapping[str, Parameter], site: BuildContext, layer: Any):
        self.settings = layer.settings
        self.by_sequence = layer.by_sequence
        self.activation = layer.activation
        self.site = site
        names = "gate", "up", "down"
        self.gate, self.up, self.down = (own[f"ffn.experts.{name}.weight"] for name in names)
        self.biases = [own.get(f"ffn.experts.{name}.bias") for name in names]
        self.router = own["ffn.router.weight"]
        self.load = own["ffn.router.load"]
        self.bias = own.get("ffn.router.bias")
        self.logit_bias = own.get("ffn.router.logit_bias")
        self.wide = wide(site.dtype)
        self.shared = None
        if self.settings.shared:
            gate, up, down = (own[f"ffn.shared.{name}.weight"] for name in names)
            self.shared = FeedForwardSegment(None, (gate, up), down, activation=layer.shared_activation)
        self.exchange = self._exchange()
        segments = np.split(site.positions(), site.plan.table.segments)
        self._positions = [
            np.split(segment, site.tp.size)[site.tp.rank] if site.tp else segment for segment in segments
        ]

    def _exchange(self) -> Flat | Hierarchical:
        site = self.site
        dispatch = Dispatch(site.plan.config, site.plan.table.segments)
        itemsize = site.dtype.itemsize
        if site.experts_far is not None:
            return Hierarchical(site.experts, site.experts_far, site.experts_near, dispatch, itemsize)
        etp, active = site.plan.config.parallel.etp, self.settings.active
        return Flat(site.experts, etp, active, dispatch.limit, dispatch.forms(itemsize))

    # ------------------------------------------------------------ forward

    def forward(self, x_BTD: torch.Tensor, context: Context) -> Walk:
        """Return the weighted sum of what the experts of each token make of it, and of the shared ones."""
        keeps = torch.is_grad_enabled()
        x_ND = x_BTD.flatten(0, 1)
        chosen = self._route(x_ND, context)
        choices = self._choices(chosen.experts, self.settings.capacity if keeps else 0.0)
        rounds = yield from self.exchange.exchange_counts(choices)
        dropped = chosen.experts.numel() - len(choices.order)
        here = router.statistics(chosen, self.settings, self._sets(x_BTD), dropped)
        everywhere = None if self.site.tokens is None else all_reduce(here.vector, self.site.tokens)
        arriving = Begun(self.exchange.dispatch(rounds, 0, x_ND, chosen.weights))
        of_shared, y_BTD = None, None
        if self.shared is not None:
            y_BTD, of_shared = yield from self.shared.forward(x_BTD, context)
        dispatched = yield from arriving.rest()
        rows = yield from self._enter(dispatched)
        combined = [(yield from self.exchange.combine(dispatched, self._made(rows)))]
        for number in range(1, rounds.num):
            # In place, without taking turns with another walk: ranks of one tp axis can have
            # different numbers of rounds, and must start what goes over that axis in one order.
            dispatched = run(self.exchange.dispatch(rounds, number, x_ND, chosen.weights))
            combined.append(run(self.exchange.combine(dispatched, self._made(run(self._enter(dispatched))))))
        statistics = here if everywhere is None else router.Statistics((yield everywhere), len(here.counts))
        sums = self._record_metrics(statistics, context)
        routed_BTD = self._summed(combined, len(x_ND)).view_as(x_BTD)
        y_BTD = routed_BTD if y_BTD is None else y_BTD + routed_BTD
        saved = SavedMixture(x_BTD, chosen, sums, rounds, rows, of_shared, context.scale)
        return y_BTD, saved if keeps else None

    def _route(self, x_ND: torch.Tensor, context: Context) -> router.Chosen:
        active = self.settings.active
        routes = context.routes
        logits = x_ND.to(self.wide) @ self.router.data.to(self.wide).t()
        if self.logit_bias is not None:
            logits += self.logit_bias.data.to(self.wide)
        bias = None if self.bias is None else self.bias.data
        if routes is None:
            return router.choose(logits, bias, self.settings)
        positions = self._positions[context.segment]
        if context.microbatch.order is not None:
            positions = context.microbatch.order[:, positions].cpu().numpy()
        replayed = routes.chosen(self.load.name, positions)
        if replayed is not None:
            rows = np.sort(replayed.reshape(-1, active).astype(np.int64))
            experts = torch.from_numpy(rows).to(x_ND.device)
            return router.Chosen(logits, experts, router.weigh(logits, experts, self.settings))
        chosen = router.choose(logits, bias, self.settings)
        made = chosen.experts.cpu().numpy().reshape(-1, positions.shape[-1], active)
        routes.record(self.load.name, positions, made)
        return chosen

    def _choices(self, experts_NK: torch.Tensor, capacity: float) -> Choices:
        """Return the choices in the order of the experts, those of one in that of the tokens.

        With a capacity, the later tokens of a rank's microbatch are dropped: they keep what other
        experts, and the residual, give them. Validation and sampling are dropless: what they
        compute would depend on the layout, and on where a prompt ends.
        """
        experts = experts_NK.flatten()
        order = experts.argsort(stable=True)
        counts = router.num_choices(experts, self.settings.count)
        if capacity:
            most = math.ceil(capacity * len(experts) / self.settings.count)
            first = (counts.cumsum(0) - counts)[experts[order]]
            order = order[torch.arange(len(order), device=order.device) - first < most]
            counts = counts.clamp(max=most)
        return Choices(experts_NK, order, counts.cpu().numpy())

    def _enter(self, dispatched: DispatchedRows) -> Walk:
        """Return the ExpertRows of what came. Here and below, messages move on between products."""
        gate = grouped_product(dispatched.x, self.gate.data, dispatched.loads)
        yield None
        up = grouped_product(dispatched.x, self.up.data, dispatched.loads)
        yield None
        for made, bias in zip((gate, up), self.biases):
            if bias is not None:
                made += row_vectors(bias.data, dispatched.loads)
        return ExpertRows(dispatched.x, dispatched.weights, gate, up, dispatched.loads)

    def _made(self, rows: ExpertRows) -> torch.Tensor:
        weights = rows.weights.to(rows.x.dtype)
        hidden = self.activation.activation(rows.gate).mul_(self.activation.scale(rows.up)).mul_(weights)
        made = grouped_product(hidden, self.down.data, rows.loads)
        if (bias := self.biases[-1]) is not None:
            made[:, _features(bias)] += row_vectors(bias.data, rows.loads) * weights
        return made

    def _record_metrics(self, statistics: router.Statistics, context: Context) -> list[torch.Tensor]:
        """Record how well loads are balanced, and return the sums of the microbatch's segments.

        The balance loss is that of a whole microbatch, and comes with its last segment.
        """
        sums = context.history.setdefault(self, []) if context.history is not None else []
        if context.segment == len(sums):  # else the forward is computed again
            sums.append(statistics.vector)
        metrics = {"z_loss": router.z_loss(statistics.z, self.settings)}
        if context.segment == self.site.plan.table.segments - 1:
            whole = router.Statistics(sum(sums), len(statistics.counts))
            shares = self._shares(whole)
            metrics["balance_loss"] = router.balance_loss(shares, whole.scores, self.settings)
        metrics["dropped"] = statistics.dropped
        ranks = self.site.cp.size if self.site.cp else 1  # each of these tells, and they are summed
        for name, value in metrics.items():
            context.record_metric(name, value / ranks)
        return sums

    def _sets(self, x_BTD: torch.Tensor) -> int:
        """Return how many sets of tokens are balanced, each by itself; generating, there is one sequence."""
        return len(x_BTD) if self.by_sequence else 1

    def _shares(self, whole: router.Statistics) -> torch.Tensor:
        """Return the shares of the experts on which the balance loss of a microbatch rests."""
        if self.settings.balance == "global":
            return self.load.data.to(whole.vector.dtype).unsqueeze(0)
        return whole.shares

    # ------------------------------------------------------------ backward

    def backward(self, saved: SavedMixture, grad_of_output: torch.Tensor, later: Later) -> Walk:
        """Return the gradient of the input.

        Weight gradients of rows of the first round are handed over, those of others added. So a
        split backward adds rounds in another order than a whole one: to wait, later rounds would
        have to be kept.
        """
        grad_ND = grad_of_output.flatten(0, 1)
        x_ND = saved.x.flatten(0, 1)
        rounds = saved.rounds
        arriving = Begun(self.exchange.dispatch(rounds, 0, grad_ND))
        grad_BTD = None
        if self.shared is not None:
            grad_BTD = yield from self.shared.backward(saved.of_shared, grad_of_output, later)
        dispatched = yield from arriving.rest()
        of_x, of_weight, products = yield from self._differentiated(saved.rows, dispatched.x)
        returning = Begun(self.exchange.combine(dispatched, of_x, of_weight))
        later(WeightGradients(products))
        combined = [(yield from returning.rest())]
        for number in range(1, rounds.num):
            rows = run(self._enter(run(self.exchange.dispatch(rounds, number, x_ND, saved.chosen.weights))))
            dispatched = run(self.exchange.dispatch(rounds, number, grad_ND))
            of_x, of_weight, products = run(self._differentiated(rows, dispatched.x))
            WeightGradients(products).add()
            combined.append(run(self.exchange.combine(dispatched, of_x, of_weight)))
        of_weights = torch.zeros_like(saved.chosen.weights)
        for part in combined:
            of_weights.view(-1)[part.choices] = part.weights
        routed_ND = self._summed(combined, len(x_ND)).add_(self._route_back(saved, x_ND, of_weights, later))
        routed_BTD = routed_ND.view_as(saved.x)
        return routed_BTD if grad_BTD is None else grad_BTD + routed_BTD

    def _differentiated(self, rows: ExpertRows, grad: torch.Tensor) -> Walk:
        """Return the gradients of rows and weights, and the weight gradients to add, a list of products."""
        weights = rows.weights.to(rows.x.dtype)
        activated = self.activation.activation(rows.gate)
        scale = self.activation.scale(rows.up)
        hidden = activated * scale
        of_weighed = grouped_product(grad, self.down.data.transpose(1, 2), rows.loads)
        yield None
        of_weights = torch.linalg.vecdot(of_weighed.to(self.wide), hidden.to(self.wide)).unsqueeze(-1)
        of_hidden = of_weighed.mul_(weights)
        of_gate = self.activation.grad_of_gate(of_hidden * scale, rows.gate)
        of_up = self.activation.grad_of_up(of_hidden.mul_(activated), rows.up)
        if (bias := self.biases[-1]) is not None:
            here = grad[:, _features(bias)]
            biased = here * row_vectors(bias.data, rows.loads)
            of_weights += biased.to(of_weights.dtype).sum(-1, keepdim=True)
            for parameter, product in zip(self.biases, (of_gate, of_up, here * weights)):
                add_sums(parameter.grad, product, rows.loads)
        of_x = grouped_product(of_gate, self.gate.data.transpose(1, 2), rows.loads)
        yield None
        of_x += grouped_product(of_up, self.up.data.transpose(1, 2), rows.loads)
        return (
            of_x,
            of_weights,
            [
                GroupedProduct(self.gate, rows.x, of_gate, rows.loads),
                GroupedProduct(self.up, rows.x, of_up, rows.loads),
                GroupedProduct(self.down, hidden.mul_(weights), grad, rows.loads),
            ],
        )

    def _summed(self, combined: list[CombinedRows], num: int) -> torch.Tensor:
        """Return the sums of what has come back for each of `num` tokens, in the order of places, [n, D]."""
        slots, rows = (
            parts[0] if len(combined) == 1 else torch.cat(parts) for parts in list(zip(*combined))[:2]
        )
        kept, places = slots.sort()
        first = torch.arange(0, num * self.exchange.slots, self.exchange.slots, device=slots.device)
        bags = torch.searchsorted(kept, first)
        # wider: on a CPU the sums of a bag of 16-bit numbers are rounded away from zero
        return functional.embedding_bag(places, rows.to(self.wide), bags, mode="sum").to(rows.dtype)

    def _route_back(
        self, saved: SavedMixture, x_ND: torch.Tensor, of_weights_NK: torch.Tensor, later: Later
    ) -> torch.Tensor:
        """Return the router's gradient of the input; its weights', and loads, are handed over."""
        shares = self._shares(router.Statistics(sum(saved.sums), self._sets(saved.x)))
        of_logits = router.grad_of_logits(saved.chosen, of_weights_NK, shares, saved.scale, self.settings)
        counts = router.num_choices(saved.chosen.experts.flatten(), self.settings.count)
        small = [Addend(parameter, counts) for parameter in (self.load, self.bias) if parameter is not None]
        small.append(Addend(self.router, of_logits.t() @ x_ND.to(of_logits.dtype)))
        if self.logit_bias is not None:
            small.append(Addend(self.logit_bias, of_logits.sum(0)))
        later(WeightGradients(small))
        return (of_logits @ self.router.data.to(of_logits.dtype)).to(x_ND.dtype)


def _features(bias: Parameter) -> slice:
    """Return which features of what experts make this rank adds the bias of."""
    return slice(bias.spec.offset[1], bias.spec.offset[1] + bias.spec.shape[1])
