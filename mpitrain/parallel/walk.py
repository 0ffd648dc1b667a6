"""A block is a list of local segments and communications.

Autograd only ever sees local segments. The backward walks the list in reverse and replaces each
communication by its adjoint, so no MPI call hides in an autograd function: the list is what
happens. Layer.traffic (plan/declared/layer.py) says what it sends, before it does.

    forward    segment   sum over tp    segment   sum over tp    -->
    backward   segment   copy           segment   copy          <--

Both directions are generators: they yield at least once per item, a started operation or None, and
are resumed with its result. So the actor decides what to do while a message travels: something
between, or another walk.

Weight gradients are handed over: those of matrix products undone. A whole backward (B) adds them
when the next item has begun, so that a sum of input gradients travels meanwhile; a split one (I)
leaves them for W.

Two walks take turns at what they start. Of a forward through experts, and a backward (DeepSeek-V3,
arXiv:2412.19437, section 3.2.1):

    forward   route, counts |             | rows there |                    | experts, rows back |
    backward                | add weights |            | experts, rows back |
    forward                 | add up, attention
    backward                | attention ...     |

Each travels while the other walk computes; where a walk has something to compute while its own
operation travels, it lets the other one start its next one first.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from mpitrain.comm.progress import Pending
from mpitrain.parallel.microbatch import Context
from mpitrain.parallel.zero.parameters import Parameter

Walk = Generator["Pending | Turn | None", Any, Any]


class DeferredGradient(Protocol):
    """Weight gradients that are still to be added: of one matrix product, or made already."""

    def add(self) -> None:
        """Add them to their buffers."""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held for them."""


@dataclass
class Addend:
    """A gradient of a small parameter, made already: its buffer may be there only later."""

    parameter: Parameter
    grad: torch.Tensor

    def add(self) -> None:
        """Add it to its buffer."""
        self.parameter.grad += self.grad

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held for it."""
        yield self.grad


@dataclass
class WeightGradients:
    """The weight gradients of one item that are still to be added. The last come first."""

    products: list[DeferredGradient]

    def add(self) -> None:
        """Add them to their buffers, and forget what they are made of."""
        while self.products:
            self.products.pop().add()

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield what is held for them."""
        for product in self.products:
            yield from product.tensors()


Later = Callable[[WeightGradients], None]


class Turn:
    """What a walk yields instead of an operation to let others start theirs.

    Then it continues, without waiting for anything.
    """

    def wait(self) -> None:
        """Return at once."""


TURN = Turn()


class Item(Protocol):
    """What a block consists of."""

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        """Yield once; return (output, what backward needs)."""

    def backward(self, saved: Any, grad_of_output: torch.Tensor, later: Later) -> Walk:
        """Yield once; return the gradient of the input, and hand the weight gradients to `later`."""


def forward(block: Sequence[Item], x: torch.Tensor, context: Context) -> Walk:
    """Walk a block; return its output and what each item saved."""
    saved = []
    for item in block:
        x, kept = yield from item.forward(x, context)
        saved.append(kept)
    return x, saved


def backward(
    block: Sequence[Item], saved: list, grad: torch.Tensor | None, later: Later | None = None
) -> Walk:
    """Walk a block in reverse and return the gradient of its input. Frees what was saved item by item.

    later: takes the weight gradients; absent, they are added here.
    """
    waiting: list[WeightGradients] = []
    for item in reversed(block):
        walk = item.backward(saved.pop(), grad, later or waiting.append)
        result = None
        while True:
            try:
                pending = walk.send(result)
            except StopIteration as end:
                grad = end.value
                break
            if waiting and pending is not None:
                yield TURN
                yield from _add_one_by_one(waiting)
            _add_now(waiting)
            result = yield pending
    _add_now(waiting)
    return grad


def _add_now(waiting: list[WeightGradients]) -> None:
    """Add all that waits, without moving messages on."""
    while waiting:
        waiting.pop(0).add()


def _add_one_by_one(waiting: list[WeightGradients]) -> Walk:
    """Add all that waits, one product after the other; messages are moved on between."""
    while waiting:
        products = waiting.pop(0).products
        while products:
            products.pop().add()
            yield None


def run(walk: Walk, between: Callable[[], None] = lambda: None) -> Any:
    """Run a walk to its end and return its result.

    Wait for what it starts, and call `between` after every item.
    """
    return run_together([walk], between)[0]


def run_together(walks: Sequence[Walk], between: Callable[[], None] = lambda: None) -> list[Any]:
    """Run walks in turns, and return their results: what one waits for travels while the others compute.

    A turn is over with the next operation that the walk starts, or if nobody has one under way,
    with the item. It depends on nothing that differs between ranks: they start what goes over an
    axis in one order.
    """
    results: list[Any] = [None] * len(walks)
    turns: deque[tuple[int, Walk, Pending | Turn | None]] = deque(
        (i, walk, None) for i, walk in enumerate(walks)
    )
    while turns:
        index, walk, pending = turns.popleft()
        try:
            pending = walk.send(None if pending is None else pending.wait())
            while pending is None and any(under_way is not None for *_, under_way in turns):
                between()
                pending = walk.send(None)
        except StopIteration as end:
            results[index] = end.value
        else:
            between()
            turns.append((index, walk, pending))
    return results


class Begun:
    """A walk of which the first operation is under way, while whoever began it does something else."""

    def __init__(self, walk: Walk):
        self._walk = walk
        self._pending = None
        self._result = None
        self._over = False
        self._send(None)

    def rest(self) -> Walk:
        """Walk on, and return what the walk returns."""
        while not self._over:
            self._send((yield self._pending))
        return self._result

    def _send(self, result: Any) -> None:
        try:
            self._pending = self._walk.send(result)
        except StopIteration as end:
            self._result = end.value
            self._over = True
            self._pending = None  # it holds what came, of which the result has a copy


class Residual:
    """x + f(x), f being a list of items."""

    def __init__(self, items: Sequence[Item]):
        self.items = items

    def forward(self, x: torch.Tensor, context: Context) -> Walk:
        y, saved = yield from forward(self.items, x, context)
        return x + y, saved

    def backward(self, saved: list, grad_of_output: torch.Tensor, later: Later) -> Walk:
        grad = yield from backward(self.items, saved, grad_of_output, later)
        return grad_of_output + grad
