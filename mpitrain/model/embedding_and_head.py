"""What computes the ends of a model: the lookup of tokens; the last norm, logits and loss.

With tensor parallelism the vocabulary is divided (Megatron-LM, arXiv:1909.08053, section 3): rank r
holds the rows from V*r/tp to V*(r+1)/tp of the table, for any V: nothing has to be padded. Written
by hand: the head's softmax goes over all ranks, and integers have no gradient. B sequences of a
microbatch, T tokens each, N = B T, D width, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather
from mpitrain.data.documents import IGNORED, positions_within
from mpitrain.kernels.functions import Functions
from mpitrain.kernels.products import product
from mpitrain.model.build_context import BuildContext, StreamPositions
from mpitrain.model.linear import WeightGradient
from mpitrain.model.segment import Segment, Tape
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Later, Walk, WeightGradients
from mpitrain.parallel.zero.parameters import Parameter

NEVER = -1e4  # a logit below all that are capped: exp gives 0, and its square is finite in all number types


class LogitLimits(NamedTuple):
    """What logits [..., V] may be. weight: of the head, or this rank's rows of it.

    padding: rows of all ranks, at the end, that no token has: they are never predicted.
    soft_cap: c: logits become c tanh(logit / c) (Gemma 2, arXiv:2408.00118, section 2); 0: they stay.
    """

    weight: Parameter
    padding: int
    soft_cap: float

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Limit logits in their memory, which autograd doesn't see, and return them."""
        inside = logits.data  # of a view that autograd watches, detach() counts the changes
        if self.soft_cap:
            inside.div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        spec = self.weight.spec
        rows = (spec.whole or spec.shape)[0] - self.padding
        begin = max(0, rows - (spec.offset[0] if spec.offset else 0))
        if self.padding and begin < spec.shape[0]:
            inside[..., begin:].fill_(NEVER if self.soft_cap else torch.finfo(logits.dtype).min)
        return logits


class RowGradients(NamedTuple):
    """Gradients [B, T, D] to be added to rows [B, T] of a table, or [T]: those are kept anyway."""

    weight: Parameter
    rows: torch.Tensor
    grads: torch.Tensor

    def add(self) -> None:
        total = self.weight.grad
        if self.rows.dim() == 1:
            grads = self.grads.sum(0, dtype=total.dtype)
        else:
            grads = self.grads.flatten(0, -2).to(total.dtype)
        total.index_add_(0, self.rows.flatten(), grads)

    def tensors(self) -> Iterator[torch.Tensor]:
        yield from (self.grads,) if self.rows.dim() == 1 else (self.rows, self.grads)


class LearnedPositions:
    """x + the vectors of its positions: those of this rank of cp, and of tp if that divides them.

    They count from the first one of each document, if these are separate.
    """

    def __init__(self, weight: Parameter, site: BuildContext):
        self.weight = weight
        self.stream = StreamPositions(site)

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Add them."""
        yield None
        saved = self.stream.begin(x, context), context.microbatch.documents, context.microbatch.order
        y = x + self.weight.data[self._rows(x, *saved)]
        return y, saved if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        rows = self._rows(grad_of_output, *saved)
        later(WeightGradients([RowGradients(self.weight, rows, grad_of_output)]))
        return grad_of_output

    def _rows(
        self, x: torch.Tensor, begin: int, documents: torch.Tensor | None, order: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the rows of the table that x has: [T], or [B, T] with documents."""
        here_T = self.stream.of(x, begin)
        if documents is None:
            return here_T
        if order is None:
            return positions_within(documents)[:, here_T]
        in_order = torch.empty_like(documents).scatter_(1, order, documents)
        return positions_within(in_order).gather(1, order[:, here_T])


@dataclass(eq=False)
class EmbeddingLookup:
    """Token numbers to vectors, times `scale`. Written by hand: integers have no gradient."""

    weight: Parameter
    scale: float = 1.0

    def forward(self, x: None, context: Context) -> Walk:
        """Look up the tokens [B, T] of the context."""
        yield None
        tokens_BT = context.microbatch.tokens
        y_BTD = self._scaled(functional.embedding(tokens_BT, self.weight.data))
        return y_BTD, tokens_BT if torch.is_grad_enabled() else None

    def backward(self, saved: torch.Tensor, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        later(WeightGradients([RowGradients(self.weight, saved, self._scaled(grad_of_output))]))

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.scale == 1 else x * self.scale


class _CrossEntropy(torch.autograd.Function):
    """The summed cross-entropy of logits [N, V] and targets [N], IGNORED ones left out.

    The gradient overwrites the logits, and so do limited logits.
    """

    @staticmethod
    def forward(ctx, logits_NV, targets_N, functions: Functions, limits: LogitLimits):
        limits.apply(logits_NV)
        ctx.soft_cap = limits.soft_cap
        log_sum_N = functions.log_sums(logits_NV)
        rows_N = targets_N.clamp(min=0)
        ctx.save_for_backward(logits_NV, log_sum_N, targets_N)
        ctx.functions = functions
        target_N = logits_NV.gather(1, rows_N[:, None]).squeeze(1)
        return (log_sum_N - target_N).masked_fill_(targets_N == IGNORED, 0).sum()

    @staticmethod
    def backward(ctx, grad_of_output):
        logits_NV, log_sum_N, targets_N = ctx.saved_tensors
        counts_N = targets_N != IGNORED
        ctx.functions.to_gradients(
            logits_NV, log_sum_N, targets_N.clamp(min=0), counts_N, grad_of_output * counts_N, ctx.soft_cap
        )
        return logits_NV, None, None, None


def _position_scores(
    logits_BTV: torch.Tensor, targets_BT: torch.Tensor, functions: Functions
) -> torch.Tensor:
    """Return each position's loss, 0 of IGNORED targets, and its likeliest token, [2, B, T]."""
    log_sum_BT = functions.log_sums(logits_BTV.flatten(0, 1)).view(targets_BT.shape)
    target_BT = logits_BTV.gather(-1, targets_BT.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    loss_BT = (log_sum_BT - target_BT).masked_fill_(targets_BT == IGNORED, 0)
    return torch.stack((loss_BT, logits_BTV.argmax(-1).to(loss_BT.dtype)))


@dataclass(eq=False)
class HeadSegment(Segment):
    """Norm, logits and the summed cross-entropy of a microbatch; without targets, the logits."""

    norm: Parameter
    norm_bias: Parameter | None
    limits: LogitLimits

    def compute(self, x_BTD: torch.Tensor, context: Context, tape: Tape) -> torch.Tensor:
        normed_BTD = tape.norm(x_BTD, self.norm, self.norm_bias)
        (logits_BTV,) = tape.linears(normed_BTD, (self.limits.weight,))
        targets = context.microbatch.targets
        if targets is None:
            return self.limits.apply(logits_BTV)
        if context.microbatch.scoring:
            return _position_scores(self.limits.apply(logits_BTV), targets, tape.functions)
        return _CrossEntropy.apply(logits_BTV.flatten(0, 1), targets.flatten(), tape.functions, self.limits)


# ---------------------------------------------------------------- with a divided vocabulary


def _local(numbers: torch.Tensor, weight: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's shard that tokens have, 0 of others, and which have one."""
    begin = weight.spec.offset[0]
    here = (numbers >= begin) & (numbers < begin + weight.spec.shape[0])
    return torch.where(here, numbers - begin, 0), here


class VocabularyEmbedding(EmbeddingLookup):
    """Token numbers to vectors: each rank those of its rows, and zeros; the sum over the axis follows."""

    def forward(self, x: None, context: Context) -> Walk:
        """Look up the tokens [B, T] of the context."""
        yield None
        rows_BT, here_BT = _local(context.microbatch.tokens, self.weight)
        y_BTD = functional.embedding(rows_BT, self.weight.data) * here_BT.unsqueeze(-1)
        return self._scaled(y_BTD), (rows_BT, here_BT) if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        rows_BT, here_BT = saved
        # picked by a mask, the host would wait for their number
        grad_BTD = self._scaled(grad_of_output.masked_fill(~here_BT.unsqueeze(-1), 0))
        later(WeightGradients([RowGradients(self.weight, rows_BT, grad_BTD)]))


class VocabularyHead:
    """Logits and summed cross-entropy, IGNORED targets left out. Collective over `axis`.

    Ranks exchange two numbers per token, the log of their share of the softmax and the target's
    logit; where positions are scored, two more. The loss is the same on all of them; the gradient
    of the input is partial, its sum follows.
    """

    def __init__(self, limits: LogitLimits, axis: Axis, functions: Functions):
        self.limits = limits
        self.weight = limits.weight
        self.axis = axis
        self.functions = functions

    def forward(self, h_BTD: torch.Tensor, context: Context) -> Walk:
        logits_NV = self.limits.apply(product(h_BTD.flatten(0, 1), self.weight.data))
        targets = context.microbatch.targets
        ignored_N = targets.flatten() == IGNORED
        targets_N, here_N = _local(targets.flatten(), self.weight)
        share_N = self.functions.log_sums(logits_NV)
        target_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1) * here_N
        scoring = context.microbatch.scoring
        numbers = (share_N, target_N, *(self._likeliest(logits_NV) if scoring else ()))
        mine = torch.stack([x.to(share_N.dtype) for x in numbers])
        gathered = yield all_gather(mine, self.axis, mine.new_empty(self.axis.size * mine.numel()))
        shares_RN, targets_RN, *likeliest = gathered.view(self.axis.size, len(numbers), -1).unbind(1)
        log_sum_N = torch.logsumexp(shares_RN, 0)
        loss_N = (log_sum_N - targets_RN.sum(0)).masked_fill_(ignored_N, 0)
        if scoring:
            most_RN, tokens_RN = likeliest
            token_N = tokens_RN.gather(0, most_RN.argmax(0, keepdim=True)).squeeze(0)
            return torch.stack((loss_N, token_N)).view(2, *targets.shape), None
        saved = (h_BTD, logits_NV, log_sum_N, targets_N, here_N, ignored_N)
        return loss_N.sum(), saved if torch.is_grad_enabled() else None

    def _likeliest(self, logits_NV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the largest logit among this rank's rows, and the number of its token, [N] each."""
        most_N, row_N = logits_NV.max(-1)
        return most_N, row_N + self.weight.spec.offset[0]

    def backward(self, saved: tuple, grad_of_output: torch.Tensor | None, later: Later) -> Walk:
        yield None
        h_BTD, logits_NV, log_sum_N, targets_N, here_N, ignored_N = saved
        factor_N = ~ignored_N if grad_of_output is None else grad_of_output * ~ignored_N
        self.functions.to_gradients(logits_NV, log_sum_N, targets_N, here_N, factor_N, self.limits.soft_cap)
        later(WeightGradients([WeightGradient((self.weight,), h_BTD.flatten(0, 1), [logits_NV])]))
        return product(logits_NV, self.weight.data.t()).view_as(h_BTD)
