"""What computes a mixture of experts: a router, an exchange in rounds, grouped products, and shared experts meanwhile.

    forward     route | counts | send rows  |  shared experts  | experts | send back | add up
    backward            send gradients      |  shared experts  | experts | send back | add up | route

B sequences of a microbatch, n positions of them on this rank, D width, E experts, K of them for a token, R rows that have come here,
F hidden units of an expert. A row is the token's activation, and behind it the weight that the router gives it: the expert weighs what
it makes before its last product, so that nobody has to keep the results of all experts for the gradient of the weights.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional

from mpitrain.comm.collectives import all_gather, all_reduce
from mpitrain.layout.experts import rows_at_once
from mpitrain.layout.traffic import Started, Traffic
from mpitrain.model import router
from mpitrain.model.feed_forward import FeedForward
from mpitrain.model.gates import Clamped, Gate, Silu
from mpitrain.model.grouped import GroupedProduct, add_sums, grouped_product, of_rows
from mpitrain.model.layers.experts import Experts as Layer
from mpitrain.model.segment import Norm
from mpitrain.model.site import Site
from mpitrain.parallel.expert.exchange import Exchange, Pair, arrived, as_rows
from mpitrain.parallel.expert.rounds import Round, Rounds
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.precision import wide
from mpitrain.parallel.walk import Item, Later, Residual, Shape, Walk, WeightGradients
from mpitrain.parallel.zero.parameters import Parameter


def experts(layer: Layer, own: Mapping[str, Parameter], site: Site) -> list[Item]:
    """Return the items of the layer."""
    return [Residual([Norm(own["ffn.norm.weight"]), Experts(layer, own, site)])]


class Rows(NamedTuple):
    """What has come to the experts of a rank, in their order: [R, D], and the weights [R, 1]; from this gate and up [R, F]."""

    x: torch.Tensor
    weights: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    order: torch.Tensor | None
    loads: list[int]


class Saved(NamedTuple):
    """What the backward needs of a microbatch. rounds: how its rows travelled.  rows: of the first round."""

    x: torch.Tensor
    chosen: router.Chosen
    order: torch.Tensor
    shares: torch.Tensor
    rounds: Rounds
    rows: Rows
    of_shared: tuple | None
    scale: float


class Experts:
    """The mixture, without norm and residual. Collective over the axis of the experts, and over the ranks with the same sequences."""

    def __init__(self, layer: Layer, own: Mapping[str, Parameter], site: Site):
        self.layer, self.settings, self.site = layer, layer.settings, site
        self.gate, self.up, self.down = (own[f"ffn.experts.{name}.weight"] for name in ("gate", "up", "down"))
        self.router, self.load, self.bias = own["ffn.router.weight"], own["ffn.router.load"], own.get("ffn.router.bias")
        self.biases = [own.get(f"ffn.experts.{name}.bias") for name in ("gate", "up", "down")]
        self.logit_bias = own.get("ffn.router.logit_bias")
        self.opening: Gate = Clamped(layer.limit) if layer.limit else Silu()
        self.axis, self.tokens, self.wide = site.experts, site.tokens, wide(site.dtype)
        shared = [own[f"ffn.shared.{name}.weight"] for name in ("gate", "up", "down")] if self.settings.shared else None
        self.shared = FeedForward(None, *shared) if shared else None
        config = site.plan.config
        self.exchange = Exchange(site.experts, config.parallel.etp)
        self.limit = rows_at_once(config, self.settings, config.parallel, site.plan.table.segments)
        segments = np.split(site.plan.positions(site.cp.rank if site.cp else 0), site.plan.table.segments)
        self._positions = [np.split(each, site.tp.size)[site.tp.rank] if site.tp else each for each in segments]
        self._balanced_rows = config.batch.micro if layer.by_sequence else 1

    # ------------------------------------------------------------ forward

    def forward(self, x_BTD: torch.Tensor, context: Context) -> Walk:
        """Return the weighted sum of what the experts of each token make of it, and what the shared ones do."""
        keeps, x_ND = torch.is_grad_enabled(), x_BTD.flatten(0, 1)
        chosen = self._route(x_ND, context)
        order, counts = self._order(chosen.experts)
        rounds = yield from self._agree(counts)
        sets = len(x_BTD) if self.layer.by_sequence else 1  # whose loads are balanced: generating, there is one sequence
        here = router.statistics(chosen, self.settings, sets, chosen.experts.numel() - len(order))
        everywhere = None if self.tokens is None else all_reduce(here.vector, self.tokens)
        first = rounds[0]
        arriving = self.exchange.send(self._packed(x_ND, chosen, order, first), first)
        of_shared, y_BTD = None, None
        if self.shared is not None:
            y_BTD, of_shared = yield from self.shared.forward(x_BTD, context)
        rows = self._enter((yield arriving) if self.axis else arriving, first)
        returning = self.exchange.send_back(self._made(rows), first)
        results = self._put(None, self._rows((yield returning) if self.axis else returning), first, len(order))
        for number in range(1, rounds.num):
            # In place, without taking turns with another walk: ranks of one tp axis can have different numbers of rounds, and must
            # start what goes over that axis in one order.
            later = rounds[number]
            more = self._enter(arrived(self.exchange.send(self._packed(x_ND, chosen, order, later), later)), later)
            made = arrived(self.exchange.send_back(self._made(more), later))
            results = self._put(results, self._rows(made), later, len(order))
        statistics = here if everywhere is None else router.Statistics((yield everywhere), sets)
        shares = self._tell(statistics, context)
        routed_BTD = _summed(results, order, chosen).view_as(x_BTD)
        y_BTD = routed_BTD if y_BTD is None else y_BTD + routed_BTD
        return y_BTD, Saved(x_BTD, chosen, order, shares, rounds, rows, of_shared, context.scale) if keeps else None

    def _route(self, x_ND: torch.Tensor, context: Context) -> router.Chosen:
        kind, routes = wide(x_ND.dtype), context.routes
        logits = x_ND.to(kind) @ self.router.data.to(kind).t()
        if self.logit_bias is not None:
            logits += self.logit_bias.data.to(kind)
        if routes is None:
            return router.choose(logits, None if self.bias is None else self.bias.data, self.settings)
        positions = self._positions[context.segment]
        replayed = routes.chosen(self.load.name, positions)
        if replayed is not None:
            experts = torch.from_numpy(np.sort(replayed.reshape(-1, self.settings.active).astype(np.int64))).to(x_ND.device)
            return router.Chosen(logits, experts, router.weigh(logits, experts, self.settings))
        chosen = router.choose(logits, None if self.bias is None else self.bias.data, self.settings)
        routes.record(self.load.name, positions, chosen.experts.cpu().numpy().reshape(-1, len(positions), self.settings.active))
        return chosen

    def _order(self, experts_NK: torch.Tensor) -> tuple[torch.Tensor, np.ndarray]:
        """Return the choices in the order of the experts, those of one in that of the tokens, and how many each expert has.

        With a capacity, the later tokens of a rank's microbatch are dropped: they keep what other experts, and the residual, give them.
        """
        experts = experts_NK.flatten()
        order = experts.argsort(stable=True)
        counts = torch.bincount(experts, minlength=self.settings.count)
        if self.settings.capacity:
            most = math.ceil(self.settings.capacity * len(experts) / self.settings.count)
            place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[experts[order]]
            order, counts = order[place < most], counts.clamp(max=most)
        return order, counts.cpu().numpy()

    def _agree(self, counts_E: np.ndarray) -> Walk:
        """Tell the other ranks of the experts how many rows will come, and return the rounds in which they do."""
        divided, every = self.site.plan.config.parallel.etp, counts_E[None]
        if self.axis is not None:
            gathered = np.empty(self.axis.size * len(counts_E), counts_E.dtype)
            every = (yield all_gather(counts_E, self.axis, gathered)).reshape(self.axis.size, -1)
        return Rounds(every, self.axis.rank if self.axis else 0, divided, self.limit)

    def _packed(self, x_ND: torch.Tensor, chosen: router.Chosen, order: torch.Tensor, this: Round) -> torch.Tensor | Pair:
        """Return the rows that this rank sends in a round, with their weights."""
        choices = _choices(order, this)
        return self.exchange.pack(_tokens(x_ND, choices, chosen), chosen.weights.flatten()[choices].unsqueeze(-1))

    def _enter(self, packed: torch.Tensor | Pair, this: Round) -> Rows:
        """Bring what has come into the order of the experts, and compute gate and up."""
        x, weights = self.exchange.unpack(packed, self.layer.width, self.wide)
        order = None if this.order is None else _index(this.order, x)
        if order is not None:
            x, weights = x.index_select(0, order), weights.index_select(0, order)
        gate, up = (grouped_product(x, parameter.data, this.loads) for parameter in (self.gate, self.up))
        for made, bias in zip((gate, up), self.biases):
            if bias is not None:
                made += of_rows(bias.data, this.loads)
        return Rows(x, weights.view(self.wide), gate, up, order, this.loads)

    def _made(self, rows: Rows) -> torch.Tensor:
        """Return what the experts make of their rows, in the order in which these have come."""
        weights = rows.weights.to(rows.x.dtype)
        hidden = self.opening.opened(rows.gate).mul_(self.opening.factor(rows.up)).mul_(weights)
        made = grouped_product(hidden, self.down.data, rows.loads)
        if (bias := self.biases[-1]) is not None:
            made[:, _features(bias)] += of_rows(bias.data, rows.loads) * weights
        return _as_come(made, rows.order)

    def _tell(self, statistics: router.Statistics, context: Context) -> torch.Tensor:
        """Say how well the loads are balanced; return the shares on which the balance loss rests."""
        by_step = self.settings.balance == "global"
        shares = self.load.data.to(statistics.vector.dtype, copy=True).unsqueeze(0) if by_step else statistics.shares
        batch, length = self.site.plan.config.batch, self.site.plan.config.data.sequence
        ranks = self.site.cp.size if self.site.cp else 1  # each of these tells, and they are summed
        for name, value in zip(("balance_loss", "z_loss"), router.losses(shares, statistics.scores, statistics.z, self.settings)):
            context.tell(name, value / (ranks * batch.global_ * length))
        context.tell("dropped", statistics.dropped / ranks)
        return shares

    # ------------------------------------------------------------ backward

    def backward(self, saved: Saved, grad_of_output: torch.Tensor, later: Later) -> Walk:
        """Return the gradient of the input. Weight gradients of rows of the first round are handed over, those of others added."""
        grad_ND, x_ND, rounds = grad_of_output.flatten(0, 1), saved.x.flatten(0, 1), saved.rounds
        first = rounds[0]
        arriving = self.exchange.send(self._packed_grads(grad_ND, saved, first), first)
        grad_BTD = None
        if self.shared is not None:
            grad_BTD = yield from self.shared.backward(saved.of_shared, grad_of_output, later)
        made, products = self._differentiated(saved.rows, (yield arriving) if self.axis else arriving)
        returning = self.exchange.send_back(made, first)
        later(WeightGradients(products))
        grads = self._put_grads((None, None), (yield returning) if self.axis else returning, first, len(saved.order))
        for number in range(1, rounds.num):
            this = rounds[number]
            rows = self._enter(arrived(self.exchange.send(self._packed(x_ND, saved.chosen, saved.order, this), this)), this)
            made, products = self._differentiated(rows, arrived(self.exchange.send(self._packed_grads(grad_ND, saved, this), this)))
            WeightGradients(products).add()
            grads = self._put_grads(grads, arrived(self.exchange.send_back(made, this)), this, len(saved.order))
        of_rows, of_weights = grads
        of_choices = torch.zeros_like(saved.chosen.weights)
        of_choices.view(-1)[saved.order] = of_weights.flatten()
        routed_ND = _summed(of_rows, saved.order, saved.chosen).add_(self._route_back(saved, x_ND, of_choices))
        routed_BTD = routed_ND.view_as(saved.x)
        return routed_BTD if grad_BTD is None else grad_BTD + routed_BTD

    def _packed_grads(self, grad_ND: torch.Tensor, saved: Saved, this: Round) -> torch.Tensor:
        return _tokens(grad_ND, _choices(saved.order, this), saved.chosen)

    def _differentiated(self, rows: Rows, packed: torch.Tensor) -> tuple[torch.Tensor | Pair, list[GroupedProduct]]:
        """Return the gradients of rows and weights, in the order in which the rows have come, and the weight gradients to add."""
        grad, weights = self._rows(packed), rows.weights.to(rows.x.dtype)
        if rows.order is not None:
            grad = grad.index_select(0, rows.order)
        opened, factor = self.opening.opened(rows.gate), self.opening.factor(rows.up)
        hidden = opened * factor
        of_weighed = grouped_product(grad, self.down.data.transpose(1, 2), rows.loads)
        of_weights = torch.linalg.vecdot(of_weighed.to(self.wide), hidden.to(self.wide)).unsqueeze(-1)
        of_hidden = of_weighed.mul_(weights)
        of_gate = self.opening.grad_of_gate(of_hidden * factor, rows.gate)
        of_up = self.opening.grad_of_up(of_hidden.mul_(opened), rows.up)
        if (bias := self.biases[-1]) is not None:
            here = grad[:, _features(bias)]
            of_weights += (here * of_rows(bias.data, rows.loads)).to(of_weights.dtype).sum(-1, keepdim=True)
            for parameter, each in zip(self.biases, (of_gate, of_up, here * weights)):
                add_sums(parameter.grad, each, rows.loads)
        of_x = grouped_product(of_gate, self.gate.data.transpose(1, 2), rows.loads)
        of_x += grouped_product(of_up, self.up.data.transpose(1, 2), rows.loads)
        made = self.exchange.pack(_as_come(of_x, rows.order), _as_come(of_weights, rows.order))
        factors = (self.gate, rows.x, of_gate), (self.up, rows.x, of_up), (self.down, hidden.mul_(weights), grad)
        return made, [GroupedProduct(*each, rows.loads) for each in factors]

    def _put_grads(self, grads: tuple, packed: torch.Tensor | Pair, this: Round, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Put gradients of rows and of their weights to those of other rounds."""
        of_rows, of_weights = self.exchange.unpack(packed, self.layer.width, self.wide)
        return self._put(grads[0], of_rows, this, count), self._put(grads[1], of_weights.contiguous().view(self.wide), this, count)

    def _route_back(self, saved: Saved, x_ND: torch.Tensor, of_weights_NK: torch.Tensor) -> torch.Tensor:
        """Return the gradient of the input by way of the router; add that of its weight, and the loads."""
        of_logits = router.grad_of_logits(saved.chosen, of_weights_NK, saved.shares, saved.scale, self.settings)
        self.router.grad += of_logits.t() @ x_ND.to(of_logits.dtype)
        if self.logit_bias is not None:
            self.logit_bias.grad += of_logits.sum(0)
        counts = torch.bincount(saved.chosen.experts.flatten(), minlength=self.settings.count)
        for parameter in (self.load, self.bias):
            if parameter is not None:
                parameter.grad += counts
        return (of_logits @ self.router.data.to(of_logits.dtype)).to(x_ND.dtype)

    # ------------------------------------------------------------ messages

    def _rows(self, elements: torch.Tensor) -> torch.Tensor:
        return as_rows(elements, self.layer.width)

    def _put(self, results: torch.Tensor | None, come: torch.Tensor, this: Round, count: int) -> torch.Tensor:
        """Put what has come back to what came in other rounds, all in the order of the experts; if there is one round, that is all."""
        rows = self.exchange.added(come, this)
        if this.rows is None:
            return rows
        results = rows.new_empty(count, rows.shape[1]) if results is None else results
        return results.index_copy_(0, _index(this.rows, rows), rows)

    def sends(self, shape: Shape, itemsize: int) -> tuple[Traffic, Shape]:
        """Counts, statistics, rows there and back; as many rows as come when all experts have equal loads."""
        positions, kind = shape[0] * shape[1], max(4, itemsize)
        forward, backward = [], []
        if self.axis is not None:
            forward.append(Started("all_gather", self.axis.name, self.axis.size * self.settings.count * 8))
        if self.tokens is not None:
            forward.append(Started("all_reduce", self.tokens.name, (2 * self._balanced_rows * self.settings.count + 2) * kind))
        if self.axis is not None:
            away = positions * self.settings.active * self.site.plan.config.parallel.etp * (self.axis.size - 1) // self.axis.size
            plain, with_weight = (away * (shape[2] * itemsize + more) for more in (0, kind))
            forward += [Started("all_to_all_v", self.axis.name, num_bytes) for num_bytes in (with_weight, plain)]
            backward += [Started("all_to_all_v", self.axis.name, num_bytes) for num_bytes in (plain, with_weight)]
        return Traffic(tuple(forward), tuple(backward)), shape


def _features(bias: Parameter) -> slice:
    """Return which features of what experts make this rank adds the bias of."""
    return slice(bias.spec.offset[1], bias.spec.offset[1] + bias.spec.shape[1])


def _index(places: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(places).to(like.device)


def _choices(order: torch.Tensor, this: Round) -> torch.Tensor:
    """Return the choices of which rows travel in a round."""
    return order if this.rows is None else order[_index(this.rows, order)]


def _tokens(x_ND: torch.Tensor, choices: torch.Tensor, chosen: router.Chosen) -> torch.Tensor:
    """Return the rows of the tokens that have made these choices."""
    return x_ND.index_select(0, choices.div(chosen.experts.shape[1], rounding_mode="floor"))


def _as_come(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return rows, in the order of the experts, in that in which they have come."""
    return rows if order is None else torch.empty_like(rows).index_copy_(0, order, rows)


def _summed(rows_RD: torch.Tensor, order: torch.Tensor, chosen: router.Chosen) -> torch.Tensor:
    """Return the sum of the rows of each token [n, D], added in the order of its experts."""
    kept, places = order.sort()
    first = torch.arange(0, chosen.experts.numel(), chosen.experts.shape[1], device=order.device)
    # In the wider type: on a CPU the sums of a bag of 16-bit numbers are rounded away from zero.
    made = functional.embedding_bag(places, rows_RD.to(wide(rows_RD.dtype)), torch.searchsorted(kept, first), mode="sum")
    return made.to(rows_RD.dtype)
