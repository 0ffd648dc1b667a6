"""The router: which experts a token is sent to, with which weights; and load balancing by losses.

n positions, E experts, K of them for a token.

Logits, scores and losses are of fp32 at least. Losses are sums over tokens, as that of the head is,
and divided with it: by the tokens of the step. What is not differentiable, which experts were
chosen and how often, is a constant in them.
"""

from typing import NamedTuple

import torch

from mpitrain.kernels.engine import gradients
from mpitrain.plan.declared.resolved import ResolvedExperts as Settings

LITTLE = 1e-20  # DeepSeek-V3's inference/model.py adds it to a sum of chosen scores, which can be 0


class Chosen(NamedTuple):
    """The experts of each token, by number. experts, weights: [n, K].  logits: [n, E]."""

    logits: torch.Tensor
    experts: torch.Tensor
    weights: torch.Tensor


def choose(logits_NE: torch.Tensor, bias_E: torch.Tensor | None, settings: Settings) -> Chosen:
    """Choose the K experts of the highest scores and bias; of equal ones, those of lower number."""
    scores = score(logits_NE, settings)
    sought = scores if bias_E is None else scores + bias_E.to(scores.dtype)
    if settings.groups_active < settings.groups:
        sought = _best_group_scores(sought, settings)
    best = sought.sort(dim=-1, descending=True, stable=True).indices[:, : settings.active]
    experts = best.sort(dim=-1).values
    return Chosen(logits_NE, experts, weigh(logits_NE, experts, settings))


def num_choices(experts: torch.Tensor, count: int) -> torch.Tensor:
    """Return how often each of `count` experts stands in `experts` [any]."""
    if not experts.is_cuda:  # else the host would wait for the largest of them
        return torch.bincount(experts, minlength=count)
    bounds = torch.arange(count + 1, device=experts.device)
    return torch.searchsorted(experts.sort().values, bounds).diff()


def score(logits_NE: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return the scores of all experts."""
    return logits_NE.softmax(-1) if settings.score == "softmax" else logits_NE.sigmoid()


def weigh(logits_NE: torch.Tensor, experts_NK: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return the weights of the chosen experts, [n, K]."""
    weights = score(logits_NE, settings).gather(-1, experts_NK)
    if settings.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + LITTLE)
    return weights * settings.scale


def _best_group_scores(scores_NE: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return scores, -inf but in the best groups: by the sum of two best experts of each
    (DeepSeek-V3, arXiv:2412.19437, section 2.1.2).
    """
    grouped = scores_NE.unflatten(-1, (settings.groups, -1))
    of_group = grouped.sort(dim=-1, descending=True).values[..., :2].sum(-1)
    best = of_group.sort(dim=-1, descending=True, stable=True).indices[:, : settings.groups_active]
    closed = torch.ones_like(of_group, dtype=torch.bool).scatter_(-1, best, False)
    return grouped.masked_fill(closed.unsqueeze(-1), -torch.inf).flatten(-2)


class Statistics:
    """What the losses of a microbatch need of all its tokens, some of which other ranks have: sums.

    vector: all of them in one, [2 rows E + 2], in this order.
    rows: sequences, if each is balanced, or 1.
    counts: tokens that have chosen each expert, [rows, E].
    scores: sums of scores, [rows, E].
    z: sum of squares of the log-sum-exp of logits.
    dropped: choices that nobody computed.
    """

    def __init__(self, vector: torch.Tensor, rows: int):
        self.vector = vector
        per_kind = (len(vector) - 2) // 2
        self.counts = vector[:per_kind].view(rows, -1)
        self.scores = vector[per_kind:-2].view(rows, -1)
        self.z = vector[-2]
        self.dropped = vector[-1]

    @property
    def shares(self) -> torch.Tensor:
        """Of all choices, those of each expert."""
        return self.counts / self.counts.sum(-1, keepdim=True)


def statistics(chosen: Chosen, settings: Settings, rows: int, dropped: int) -> Statistics:
    """Return the Statistics of the tokens that are here. rows, dropped: as there."""
    scores = _parts(chosen.logits, settings)
    counts = torch.zeros(rows, settings.count, dtype=scores.dtype, device=scores.device)
    by_row = chosen.experts.view(rows, -1)
    counts.scatter_add_(1, by_row, torch.ones_like(by_row, dtype=scores.dtype))
    rest = scores.new_full((2,), dropped)
    rest[0] = _z(chosen.logits)
    sums = scores.view(rows, -1, settings.count).sum(1)
    return Statistics(torch.cat([counts.flatten(), sums.flatten(), rest]), rows)


def balance_loss(shares: torch.Tensor, scores: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return w E sum_e f_e p_e. shares f, of choices, and scores p, sums of them: [rows, E].

    Scores that are sigmoids are their parts of their sum (Switch Transformers, arXiv:2101.03961,
    equation 4; by sequences, DeepSeek-V3, section 2.1.2).
    """
    return settings.balance_weight * settings.count * (shares * scores).sum()


def z_loss(z: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return w (log sum exp of logits)^2 (ST-MoE, arXiv:2202.08906, equation 5). z: sum of squares."""
    return settings.z_weight * z


def grad_of_logits(
    chosen: Chosen, grad_of_weights: torch.Tensor, shares: torch.Tensor, scale: float, settings: Settings
) -> torch.Tensor:
    """Return the gradient of logits [n, E], by that of weights [n, K] and the losses times `scale`."""
    with torch.enable_grad():
        logits = chosen.logits.detach().requires_grad_()
        weights = weigh(logits, chosen.experts, settings)
        scores = _parts(logits, settings).view(len(shares), -1, settings.count).sum(1)
        loss = balance_loss(shares, scores, settings) + z_loss(_z(logits), settings)
        return gradients([weights, loss], [logits], [grad_of_weights, torch.full_like(loss, scale)])[0]


def _parts(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """Return scores that add up to 1."""
    scores = score(logits, settings)
    return scores if settings.score == "softmax" else scores / (scores.sum(-1, keepdim=True) + LITTLE)


def _z(logits: torch.Tensor) -> torch.Tensor:
    return logits.logsumexp(-1).square().sum()
