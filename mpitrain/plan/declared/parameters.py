"""A parameter, whole or the box of it that a rank holds. Integers and names only."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from mpitrain.comm.base.grid import split
from mpitrain.config import Config

# dims of a matrix [outputs, inputs]
ROWS = 0
COLUMNS = 1
STD = 0.02
EXPERT = "expert"  # the domain of experts, and dim 0 of their parameters
EPS = 1e-5  # of an RMSNorm


class NormKind(Enum):
    """What a norm is. RMS, LAYER: arXiv:1910.07467, arXiv:1607.06450.

    RMS_PLUS_ONE: multiplies by 1 + weight (Gemma). NONE: there is none before a sublayer (OLMo 2).
    """

    RMS = "rms"
    RMS_PLUS_ONE = "1 + weight"
    LAYER = "layer"
    NONE = "none"


@dataclass(frozen=True)
class Spec:
    """What a layer declares of a parameter, and where a rank has which box of it.

    std: of its normal distribution at first; 0: `constant` everywhere.
    divided: the dim that tensor parallelism divides; None: every rank has all of it.
    pieces: into how many it can be divided, 0 for any number; with more ranks than that each piece
    is repeated on neighbours.
    domain: of the ranks that divide and sum it; in that of experts dim 0 numbers these and is
    divided by expert parallelism, and `divided` is another dim.
    group: of the optimiser: `matrix` between layers, `table` with a row for each token or position,
    `vector`; vectors don't decay.  `load` and `bias` aren't trained (optim/expert_bias.py).
    active: the share of it that a token meets.
    frozen: it stays as it is (optimizer.frozen): no update, no moments, no part of the norm.
    tied: both ends of the model use it.
    eps: of the norm whose weight this is.
    plus_one: that norm multiplies by 1 + weight.
    met_apart: not divided, yet each rank of tensor parallelism meets it with other features, so
    that its gradient is a sum over them however positions are divided: the norm of each head's
    queries.

    whole, offset: shape of the logical parameter, and where the box lies in it.
    copies: ranks of the tensor-parallel axis that hold this same box; copy: which of them this is.
    over: the axis over which the gradients of copies are summed, where each has only part of it.
    """

    name: str
    shape: tuple[int, ...]
    std: float = 0.0
    constant: float = 1.0
    divided: int | None = None
    pieces: int = 0
    domain: str = "dense"
    group: str = "vector"
    active: float = 1.0
    frozen: bool = False
    tied: bool = False
    eps: float = EPS
    plus_one: bool = False
    met_apart: bool = False
    whole: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    copies: int = 1
    copy: int = 0
    over: str | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def trained(self) -> bool:
        """Whether the optimiser steps along its gradient."""
        return self.group not in ("load", "bias")

    @property
    def updated(self) -> bool:
        """Whether the optimiser has it: it is trained, and isn't frozen."""
        return self.trained and not self.frozen

    @property
    def partial(self) -> bool:
        """Whether each copy has only part of the gradient."""
        return self.over is not None

    def named(self, name: str) -> "Spec":
        return replace(self, name=name)

    def on(self, shard: "Shard") -> "Spec":
        """Return the box that one rank of the tensor-parallel axis holds."""
        offset = [0] * len(self.shape)
        if self.domain == EXPERT:
            assert self.divided is not None  # an expert is divided along a dim of its own
            spec = replace(self, whole=self.shape, offset=tuple(offset))
            return spec._part(0, *shard.experts)._part(self.divided, *shard.hidden)
        if self.divided is None:
            # each rank has seen some positions only
            over = "tp" if shard.size > 1 and (shard.sequence or self.met_apart) else None
            return replace(
                self, whole=self.shape, offset=tuple(offset), copies=shard.size, copy=shard.rank, over=over
            )
        pieces = min(self.pieces or shard.size, shard.size)
        copies = shard.size // pieces
        bounds = split(self.shape[self.divided], pieces)
        begin, end = bounds[shard.rank // copies :][:2]
        shape = list(self.shape)
        shape[self.divided] = end - begin
        offset[self.divided] = begin
        # each copy serves other heads
        over = None if copies == 1 else "tp" if copies == shard.size else "kv"
        return replace(
            self, whole=self.shape, shape=tuple(shape), offset=tuple(offset), copies=copies,
            copy=shard.rank % copies, over=over,
        )  # fmt: skip

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield where elements [begin, end) of the box, at least one, are in the whole: first
        element and length of each unbroken run.
        """
        cut = max((dim for dim, length in enumerate(self.shape) if length != self.whole[dim]), default=0)
        run = math.prod(self.shape[cut:])
        for at in range(begin // run * run, end, run):
            first = max(begin, at)
            yield self.place(first), min(end, at + run) - first

    def place(self, index: Any) -> Any:
        """Return where an element of the box is in the whole; of a tensor of them, where each is."""
        place, stride = 0, 1
        for length, whole, offset in zip(reversed(self.shape), reversed(self.whole), reversed(self.offset)):
            place = place + (offset + index % length) * stride
            stride = stride * whole
            index = index // length
        return place

    def _part(self, dim: int, rank: int, size: int) -> "Spec":
        length = self.shape[dim] // size
        shape = list(self.shape)
        offset = list(self.offset)
        shape[dim] = length
        offset[dim] = rank * length
        return replace(self, shape=tuple(shape), offset=tuple(offset))


@dataclass(frozen=True)
class Shard:
    """Rank `rank` of `size` of the tensor-parallel axis.

    sequence: activations between blocks are divided over it, too.
    experts, hidden: which part of the experts, and of each of them, and of how many.
    """

    rank: int = 0
    size: int = 1
    sequence: bool = False
    experts: tuple[int, int] = (0, 1)
    hidden: tuple[int, int] = (0, 1)


WHOLE = Shard()


def norm(
    name: str, length: int, eps: float, kind: NormKind = NormKind.RMS, *, met_apart: bool = False
) -> tuple[Spec, ...]:
    """Return the parameters of a norm over `length` features: `name.weight`, of a LayerNorm `name.bias`."""
    if kind is NormKind.NONE:
        return ()
    plus_one = kind is NormKind.RMS_PLUS_ONE
    constant = 0.0 if plus_one else 1.0
    weight = Spec(
        f"{name}.weight", (length,), constant=constant, eps=eps, plus_one=plus_one, met_apart=met_apart
    )
    of_layer = (bias(f"{name}.bias", length, None),) if kind is NormKind.LAYER else ()
    return weight, *of_layer


def bias(name: str, length: int, divided: int | None = ROWS, *, pieces: int = 0) -> Spec:
    """Return a vector of zeros that is added to a product's outputs, divided as they are."""
    return Spec(name, (length,), constant=0.0, divided=divided, pieces=pieces)


def matrix(
    name: str,
    rows: int,
    columns: int,
    divided: int | None,
    *,
    std: float = STD,
    pieces: int = 0,
    group: str = "matrix",
    tied: bool = False,
) -> Spec:
    """Return a matrix, of which tensor parallelism divides one dim, or none."""
    return Spec(name, (rows, columns), std, divided=divided, pieces=pieces, group=group, tied=tied)


def stack(
    name: str, experts: int, rows: int, columns: int, divided: int, *, std: float = STD, active: float
) -> Spec:
    """Return a matrix for each expert, of which expert tensor parallelism divides one dim."""
    return Spec(
        name, (experts, rows, columns), std, divided=1 + divided, domain=EXPERT, group="matrix", active=active
    )


def product_flops(specs: Iterable[Spec]) -> float:
    """Return the FLOPs of a token, forward and backward, in products with matrices between layers."""
    return 6.0 * sum(spec.numel * spec.active for spec in specs if spec.group == "matrix")


def residual_std(depth: int) -> float:
    """Return the std of one of `depth` projections into a residual stream (GPT-2, section 2.3)."""
    return float(STD / depth**0.5)


def itemsizes_of(config: Config) -> tuple[int, int]:
    """Return the bytes of a number of weights and activations, and of one of gradients and master weights."""
    return {"fp64": (8, 8), "fp32": (4, 4)}.get(config.precision.compute, (2, 4))
