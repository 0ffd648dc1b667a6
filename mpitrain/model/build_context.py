"""Where the layers of a stage are built: the axes they are spread over, and what they share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from mpitrain.comm.axis import Axis
from mpitrain.kernels.attention import AttentionRequest, Kernel, choose
from mpitrain.kernels.attention_window import BLOCK
from mpitrain.kernels.functions import EAGER, Functions
from mpitrain.kernels.precision import TYPES
from mpitrain.model.layers.rope import Rope
from mpitrain.model.regather import Regather
from mpitrain.model.rotary import Rotary
from mpitrain.model.segment import NormSegment
from mpitrain.parallel.async_tp import Chunked
from mpitrain.parallel.communication import Communication
from mpitrain.parallel.context.attention import ContextAttention
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.walk import Item, Residual
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.plan.plan import Plan

SEQUENCE = 1  # dim of activations [B, T, D]


class StreamPositions:
    """Positions of the residual stream on this rank: of cp, and of tp if that divides them."""

    def __init__(self, site: "BuildContext"):
        self._here = torch.from_numpy(site.positions()).to(site.device)
        self._part = site.tp.rank if site.tp and site.plan.config.parallel.sequence else 0

    def begin(self, x: torch.Tensor, context: Context) -> int:
        """Return where the positions of x [B, T, D] begin, which a backward keeps of them."""
        return context.start + self._part * x.shape[1]

    def of(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        """Return the positions [T] of x from there on."""
        return self._here[begin : begin + x.shape[1]]


class Heads(NamedTuple):
    """Heads of an attention: of queries, of keys and values, and their width."""

    queries: int
    kv: int
    width: int


@dataclass
class BuildContext:
    """tp, cp: the axes, or None where all of each layer, or of the sequence, is here.

    rotaries: the tables of each kind.
    experts, tokens: the axes of the experts and of the same sequences, or None where all are here.
    experts_near, experts_far: those of rows that go to nodes first, or None.
    functions: what is computed between products.
    training: whether there are gradients; a forward needs none.
    attention_kernels: those that the layers built so far will take, in their order.
    """

    plan: Plan
    device: torch.device
    tp: Axis | None = None
    cp: Axis | None = None
    experts: Axis | None = None
    tokens: Axis | None = None
    experts_near: Axis | None = None
    experts_far: Axis | None = None
    functions: Functions = EAGER
    training: bool = True
    rotaries: dict[Rope, Rotary] = field(default_factory=dict)
    attention_kernels: list[Kernel] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name in ("tp", "cp", "experts", "tokens", "experts_near", "experts_far"):
            axis = getattr(self, name)
            setattr(self, name, axis if axis is not None and axis.size > 1 else None)

    @property
    def dtype(self) -> torch.dtype:
        """The type of weights and activations."""
        return TYPES[self.plan.config.precision.compute]

    @property
    def fp8(self) -> bool:
        """Whether the linears of a block multiply in fp8."""
        return self.plan.config.precision.compute == "fp8"

    @property
    def by_chunks(self) -> bool:
        """Whether what tp sends goes chunk by chunk."""
        return self.tp is not None and self.plan.config.parallel.async_tp

    def positions(self) -> np.ndarray:
        """Return the positions of a sequence that this rank of cp has, [T]."""
        return self.plan.positions(self.cp.rank if self.cp else 0)

    def rotary(self, rope: Rope) -> Rotary:
        """Return the tables for the positions that are here, once for all layers of the stage."""
        if rope not in self.rotaries:
            positions = torch.from_numpy(self.positions())
            length, ordered = self.plan.config.data.sequence, self.plan.orders_rows
            self.rotaries[rope] = Rotary(
                rope, positions, length, self.dtype, self.device, self.functions, ordered
            )
        return self.rotaries[rope]

    def constants(self) -> list[torch.Tensor]:
        """Return what is in memory all the time, for all microbatches."""
        return [table for rotary in self.rotaries.values() for table in (rotary.cos, rotary.sin)]

    def attention_over_cp(self, heads: Heads) -> ContextAttention | None:
        """Return the attention proper where the sequence is spread over ranks. heads: of this rank."""
        if self.cp is None:
            return None
        kind, sequence = self.plan.config.parallel.context, self.plan.config.data.sequence
        return ContextAttention(self.cp, kind, sequence, *heads)

    def note_kernel(self, request: AttentionRequest, heads: Heads, over_cp: ContextAttention | None) -> None:
        """Note which kernel a layer's attention takes: the first time, and for its largest tile."""
        config = self.plan.config
        segments = self.plan.table.segments
        queries = config.data.sequence // segments
        masked = config.data.separates or segments > 1 or 0 < request.window < queries
        if request.window:
            queries = min(queries, max(request.window, BLOCK))
        by_documents = config.data.separates and self.device.type == "cpu"
        if by_documents:  # the largest that there can be is a whole row
            masked = 0 < request.window < queries
        one = torch.empty(1, 1, 1, heads.width, dtype=self.dtype, device=self.device)
        q, k = (one.expand(config.batch.micro, count, queries, -1) for count in (heads.queries, heads.kv))
        if over_cp is None:
            kernel = choose(request, q, k, masked)
            if by_documents and kernel is not Kernel.CPU_16BIT:
                kernel = choose(request, q, k, masked, True)
        else:
            kernel = over_cp.kernel(q, request, masked)
        self.attention_kernels.append(kernel)

    def residual(self, inner: Item, norm: Parameter) -> list[Item]:
        """Return x + inner(norm(x)); without tp, `inner` has the norm.

            one rank      x + [ inner ]
            tp            x + [ norm | copy   | inner | sum     ]  x is whole on every rank
            tp, sequence  x + [ norm | gather | inner | scatter ]  x is divided along the sequence

        Megatron-LM (arXiv:1909.08053) and its sequence parallelism (arXiv:2205.05198, section 4.2).
        """
        return [Residual(self.between([inner], NormSegment(norm)))]

    def sublayer(self, norm: NormSegment | None, inner: Item, after: Sequence[Item] = ()) -> list[Item]:
        """Return the same, of an item that treats each position alone: chunk by chunk, where tp does so.

        norm: None: there is none.  after: items after the sum.
        """
        if self.by_chunks:
            chunked = Chunked(inner, self.tp, gather=True, scatter=True)
            items: list[Item] = [norm, chunked] if norm else [chunked]
        else:
            items = self.between([inner], norm)
        return [Residual([*items, *after])]

    def between(self, inner: list[Item], norm: NormSegment | None = None) -> list[Item]:
        """Return items that tp divides, between what brings activations and partial results back.

        norm: before that; without tp, `inner` has it.
        """
        if not self.tp:
            return inner
        if self.plan.config.parallel.regather:
            return [Regather(norm, inner, self.tp, SEQUENCE), self.out()]
        return [*([norm] if norm else []), self.into(), *inner, self.out()]

    def into(self) -> Communication:
        """Return what brings activations between blocks to a layer that tp divides."""
        return self._over_tp("gather", "copy")

    def out(self) -> Communication:
        """Return what brings the partial results of such a layer back."""
        return self._over_tp("scatter", "sum")

    def _over_tp(self, divided: str, whole: str) -> Communication:
        """Return a communication by whether positions of the stream are divided over tp."""
        if self.plan.config.parallel.sequence:
            return Communication(divided, self.tp, SEQUENCE)
        return Communication(whole, self.tp)
