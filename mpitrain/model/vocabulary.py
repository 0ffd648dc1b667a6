"""Embedding and head whose vocabulary is divided over the tensor-parallel axis (Megatron-LM, arXiv:1909.08053, section 3).

Rank r holds the rows from V*r/tp to V*(r+1)/tp of the table, for any V: nothing is padded. Written by hand: the head's softmax goes
over all ranks, and integers have no gradient.
"""

from typing import Any

import torch
from torch.nn import functional

from mpitrain.comm.collectives import all_gather
from mpitrain.comm.mesh import Axis
from mpitrain.data.documents import IGNORED
from mpitrain.layout.traffic import Started, Traffic
from mpitrain.model.linear import add_product, product
from mpitrain.parallel.precision import wide
from mpitrain.parallel.walk import Later, Local, Shape, Walk
from mpitrain.parallel.zero.parameters import Parameter


def _local(numbers: torch.Tensor, weight: Parameter) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of this rank's shard that tokens belong to, and which tokens belong to it; the others' row is 0."""
    begin, count = weight.spec.offset[0], weight.spec.shape[0]
    here = (numbers >= begin) & (numbers < begin + count)
    return torch.where(here, numbers - begin, 0), here


class VocabularyEmbedding(Local):
    """Token numbers to vectors: each rank those of its rows, and zeros; the sum over the axis follows."""

    def __init__(self, weight: Parameter):
        self.weight = weight

    def forward(self, x: None, context: Any) -> Walk:
        """Look up the tokens [B, T] of the context."""
        yield None
        rows_BT, here_BT = _local(context.tokens, self.weight)
        y_BTD = functional.embedding(rows_BT, self.weight.data) * here_BT.unsqueeze(-1)
        return y_BTD, (rows_BT, here_BT) if torch.is_grad_enabled() else None

    def backward(self, saved: tuple, grad_of_output: torch.Tensor, later: Later) -> Walk:
        yield None
        rows_BT, here_BT = saved
        self.weight.grad.index_add_(0, rows_BT[here_BT], grad_of_output[here_BT].to(self.weight.grad.dtype))


class VocabularyHead:
    """Logits and summed cross-entropy: ranks exchange two numbers per token, the log of their share of the softmax and the target's logit.

    IGNORED targets are left out. The loss is the same on all ranks of the axis; the gradient of the input is partial, its sum follows.
    """

    def __init__(self, weight: Parameter, axis: Axis):
        self.weight, self.axis = weight, axis

    def forward(self, h_BTD: torch.Tensor, context: Any) -> Walk:
        h_ND = h_BTD.flatten(0, 1)
        logits_NV = product(h_ND, self.weight.data).to(wide(h_ND.dtype))
        ignored_N = context.targets.flatten() == IGNORED
        targets_N, here_N = _local(context.targets.flatten(), self.weight)
        share_N = torch.logsumexp(logits_NV, -1)
        target_N = logits_NV.gather(1, targets_N[:, None]).squeeze(1) * here_N
        mine = torch.stack((share_N, target_N))
        every = yield all_gather(mine, self.axis, mine.new_empty(self.axis.size * mine.numel()))
        shares_RN, targets_RN = every.view(self.axis.size, 2, -1).unbind(1)
        log_sum_N = torch.logsumexp(shares_RN, 0)
        loss = (log_sum_N - targets_RN.sum(0)).masked_fill_(ignored_N, 0).sum()
        saved = (h_BTD, logits_NV, log_sum_N, targets_N, here_N, ignored_N)
        return loss, saved if torch.is_grad_enabled() else None

    def sends(self, shape: Shape, itemsize: int) -> tuple[Traffic, Shape]:
        """Two numbers per token, of every rank."""
        num_tokens = shape[0] * shape[1]
        return Traffic((Started("all_gather", self.axis.name, 2 * num_tokens * self.axis.size * max(4, itemsize)),)), shape

    def backward(self, saved: tuple, grad_of_output: torch.Tensor | None, later: Later) -> Walk:
        yield None
        h_BTD, logits_NV, log_sum_N, targets_N, here_N, ignored_N = saved
        grad_NV = logits_NV.sub_(log_sum_N[:, None]).exp_()
        grad_NV[here_N, targets_N[here_N]] -= 1
        grad_NV[ignored_N] = 0
        if grad_of_output is not None:
            grad_NV.mul_(grad_of_output)
        grad_NV = grad_NV.to(h_BTD.dtype)
        later(lambda: add_product(self.weight.grad, grad_NV, h_BTD.flatten(0, 1)))
        return product(grad_NV, self.weight.data.t()).view_as(h_BTD)
