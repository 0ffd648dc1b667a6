"""Communications of a layer.

A collective over one axis, along one dim, whose backward is the adjoint operation.
"""

import torch

from mpitrain.comm.axis import Axis
from mpitrain.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from mpitrain.comm.progress import Pending
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Later, Walk
from mpitrain.plan.declared.traffic import ADJOINT


def _copy(x: torch.Tensor, axis: Axis) -> None:
    return None


def _sum(x: torch.Tensor, axis: Axis) -> Pending:
    return all_reduce(x.clone(), axis)


def _gather(x: torch.Tensor, axis: Axis) -> Pending:
    return all_gather(x, axis, x.new_empty(axis.size * len(x), *x.shape[1:]))


START = {"copy": _copy, "sum": _sum, "gather": _gather, "scatter": reduce_scatter, "exchange": all_to_all}


class Communication:
    """A collective over one axis, along one dim of a tensor; its backward is the adjoint operation.

    copy: replicated input used differently by every rank.
    sum: partial results to their sum.
    gather: shards to the whole.
    scatter: partial results to shards of their sum.
    exchange: the r-th part to rank r.

    The dim divides by the axis size.
    """

    def __init__(self, name: str, axis: Axis, dim: int = 0):
        self.name = name
        self.axis = axis
        self.dim = dim

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        y = yield from self._run(self.name, x)
        return y, None

    def backward(self, saved: None, grad_of_output: torch.Tensor, later: Later) -> Walk:
        return (yield from self._run(ADJOINT[self.name], grad_of_output))

    def _run(self, name: str, x: torch.Tensor) -> Walk:
        first = x.transpose(0, self.dim)
        flat = yield START[name](first.contiguous(), self.axis)
        return x if flat is None else flat.view(-1, *first.shape[1:]).transpose(0, self.dim)
