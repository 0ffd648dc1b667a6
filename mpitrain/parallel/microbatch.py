"""Microbatches: cut from the rows of a step, and what the items of a block know of one besides their
input.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch

from mpitrain.data.documents import Ends, further_tokens, separate, with_loss
from mpitrain.kernels import fp8
from mpitrain.kernels.document_spans import Spans
from mpitrain.kernels.dropout import DropoutDraw
from mpitrain.kernels.functions import EAGER, Functions
from mpitrain.plan.plan import Plan
from mpitrain.plan.routing import Routes


@dataclass(frozen=True)
class Microbatch:
    """Tokens are there on the first stage, targets on the last. [B, T] each, of a segment of it if
    sequences are cut.

    further: targets of each further token that is predicted (model/multi_token.py), [B, T] each.
    ahead: what each of these is predicted from: the token before it, with loss or without.
    documents: the number of each position's document in the whole sequence, [B, T], if attention
    stays within documents.
    order: the position of each in its row, [B, T], if chunks have shares of documents
    (plan/division/sequence.py).
    scoring: the head returns the loss and the likeliest token of each position, [2, B, T], in place
    of the summed loss.
    """

    tokens: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    further: tuple[torch.Tensor, ...] = ()
    ahead: tuple[torch.Tensor, ...] = ()
    documents: torch.Tensor | None = None
    order: torch.Tensor | None = None
    scoring: bool = False


class MicrobatchCutter:
    """Cuts a data-parallel rank's rows of a step into one rank's microbatches, and these into segments.

    first, last: whether a stage of the rank reads tokens, and targets.
    positions: of a sequence, those that the rank has, [T].
    """

    def __init__(self, plan: Plan, cp_rank: int, first: bool, last: bool):
        self._micro = plan.config.batch.micro
        self._mtp = plan.config.model.mtp
        self._num_microbatches = plan.num_microbatches
        self._segments = plan.table.segments
        self.positions = torch.from_numpy(plan.positions(cp_rank))
        self._placement = plan.placement if plan.orders_rows else None
        self.first = first
        self.last = last

    def needs_tokens(self, separate_documents: bool) -> bool:
        """Return whether the rank has to see tokens: stages in the middle look only for documents."""
        return self.first or self.last or separate_documents

    def cut(
        self, tokens: torch.Tensor, ends: Ends | None = None, scored: torch.Tensor | None = None
    ) -> list[Microbatch]:
        """Return the rank's microbatches of a step, segment after segment.

        Where other data ranks have more, those that it lacks are empty, and stand last.

        tokens: the rows, [batch, sequence + 1].
        Inputs and targets are those of this rank's positions; targets are one position ahead in the
        row, wherever that is.
        ends: where documents end, if they are separate.
        scored: whether targets carry loss, [batch, sequence], or [batch, 1] of whole rows; None: all do.
        """
        if not self.needs_tokens(ends is not None):
            return [Microbatch() for _ in range(self._num_microbatches * self._segments)]
        documents, next_tokens = (None, tokens[:, 1:]) if ends is None else separate(tokens, ends)
        order = None if documents is None else self._order(documents)
        fields = (
            self._segments_of(tokens, order) if self.first else repeat(None),
            *(self._targets(next_tokens, scored, order) if self.last else [repeat(None), *[repeat(())] * 2]),
            repeat(None) if documents is None else self._of_whole_sequences(in_order(documents, order)),
            repeat(None) if order is None else self._of_whole_sequences(order),
        )
        cut = [Microbatch(*segment) for segment in zip(*fields)]
        return cut + [Microbatch()] * (self._num_microbatches * self._segments - len(cut))

    def _targets(
        self, next_tokens: torch.Tensor, scored: torch.Tensor | None, order: torch.Tensor | None
    ) -> tuple[Iterable, Iterable, Iterable]:
        """Return the targets of each segment, those of further tokens, and what these are predicted from."""
        tokens = further_tokens(next_tokens, self._mtp)
        targets = tokens if scored is None else with_loss(tokens, scored)
        first, *further = (self._segments_of(x, order) for x in targets)
        if not further:
            return first, repeat(()), repeat(())
        ahead = (
            (first, *further[:-1]) if scored is None else [self._segments_of(x, order) for x in tokens[:-1]]
        )
        return first, zip(*further), zip(*ahead)

    def _segments_of(self, rows: torch.Tensor, order: torch.Tensor | None) -> list[torch.Tensor]:
        here = in_order(rows, order)[:, self.positions.to(rows.device)]
        length = len(self.positions) // self._segments
        return [segment for part in here.split(self._micro) for segment in part.split(length, dim=1)]

    def _order(self, documents: torch.Tensor) -> torch.Tensor | None:
        """Return the order of rows whose chunks have shares of documents, [batch, sequence]."""
        if self._placement is None:
            return None
        rows = [self._placement.order(row) for row in documents.cpu().numpy()]
        return torch.from_numpy(np.stack(rows)).to(documents.device)

    def _of_whole_sequences(self, rows: torch.Tensor) -> list[torch.Tensor]:
        # queries here meet keys of all positions
        return [part for part in rows.split(self._micro) for _ in range(self._segments)]


def in_order(rows: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Return rows in the order in which ranks have them."""
    return rows if order is None else rows.gather(1, order)


class Keeping(Protocol):
    """What a forward keeps for its backward, and where. selective: what is cheap to make again isn't kept."""

    selective: bool

    def saving(self) -> AbstractContextManager:
        """Take care of what autograd saves meanwhile."""

    def put(self, kept: Any) -> Any:
        """Take care of a tensor, or of the tensors of a named tuple; model/offload.py gives them back."""


@dataclass(frozen=True)
class KeepAll:
    """Everything stays where it is. selective: but for what is cheap to make again."""

    selective: bool = False

    def saving(self) -> AbstractContextManager:
        return nullcontext()

    def put(self, kept: Any) -> Any:
        return kept


class CachedTensors(Protocol):
    """What one layer keeps of earlier tokens, [B, K, positions, features] each."""

    def put(self, start: int, *tensors: torch.Tensor) -> None:
        """Keep those of the tokens from position `start` on."""

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return those of all positions that are kept."""

    def seen(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Return the columns of these positions of a mask [..., all positions so far]."""


class DecodingCache(Protocol):
    """What the layers keep of a text that is generated (model/kv_cache.py).

    length: tokens so far, without those of the forward under way.
    """

    length: int

    def of(self, layer: object, window: int = 0) -> CachedTensors:
        """Return what a layer keeps. window: positions, at most; 0: all."""


class RegatheredInput:
    """The input of a layer's first products, which isn't kept: the backward gathers it again.

    The gradient of the input doesn't need it, those of the weights do (model/regather.py).
    quantise: rounds it, where the weight gradients are multiplied in fp8.
    factor: what they are made of, [N, K]; None until it has arrived.
    """

    def __init__(self) -> None:
        self.quantise: fp8.Quantise | None = None
        self.factor: torch.Tensor | fp8.Quantised | None = None

    def arrive(self, whole: torch.Tensor) -> None:
        """Take the gathered input [B, T, K]."""
        rows = whole.flatten(0, -2)
        if self.quantise is not None:
            (self.factor,) = self.quantise(rows, fp8.E4M3, fp8.MatrixOrder.COLUMNS)
        else:
            self.factor = rows


def ignored(name: str, value: torch.Tensor) -> None:
    """Drop a metric that nobody records."""


@dataclass(frozen=True)
class Context:
    """A microbatch on its way through a stage.

    start, segment: the first position of what is here, and its number, if sequences are cut.
    history: of the segments so far (model/kv_history.py).
    visible: what attention adds to its scores, if causality isn't all there is to it.
    spans: in place of it, documents whose attention is computed one by one.
    keeping: what is kept for the backward, and where.
    record_metric: takes numbers that a layer makes besides its output, by their names.
    scale: what the loss is multiplied by, for layers that have one of their own.
    routes: to experts, recorded or replayed.
    dropout: whose masks it has; None: nothing is dropped, as in validation.
    functions: what segments call between products.
    cache: of the tokens before `start`, if a text is generated token by token.
    regathered: the input, where the backward gathers it again.
    """

    microbatch: Microbatch = Microbatch()
    start: int = 0
    segment: int = 0
    history: dict[object, list] | None = None
    visible: torch.Tensor | None = None
    spans: Spans | None = None
    keeping: Keeping = field(default=KeepAll())
    record_metric: Callable[[str, torch.Tensor], None] = ignored
    scale: float = 1.0
    routes: Routes | None = None
    dropout: DropoutDraw | None = None
    functions: Functions = EAGER
    cache: DecodingCache | None = None
    regathered: RegatheredInput | None = None
