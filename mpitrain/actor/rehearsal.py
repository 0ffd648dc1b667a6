"""What a rank would start in a step, in order and to the byte: known from the configuration alone, before anything runs.

The actor itself walks the rank's program, on axes on which nothing travels, with items that compute nothing. Whatever stands between
the items of blocks is the code that trains; of itself, each item says what it starts for the shape it is given (parallel/walk.py).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.stage import Microbatch, Stage
from mpitrain.comm.rehearsal import SilentMesh
from mpitrain.comm.wire import sent_bytes
from mpitrain.config import Config
from mpitrain.layout.axes import axes_of
from mpitrain.layout.text import aligned, megabytes
from mpitrain.layout.traffic import Started
from mpitrain.parallel.walk import Item, Later, Residual, Shape, Walk
from mpitrain.schedules.actions import Action

META = torch.device("meta")  # shapes without memory


class Rehearsal:
    """One rank of a layout, without MPI and without memory."""

    def __init__(self, config: Config, rank: int):
        axes = axes_of(config)
        self._mesh = SilentMesh(rank, axes.of(rank), axes.carried)
        self._actor = _EmptyActor(config, self._mesh, META, stage_type=_EmptyStage)
        table = self._actor.table
        self._microbatches = [Microbatch()] * (table.copies * table.num_microbatches)

    def training(self) -> dict[str, list[tuple[str, int]]]:
        """Return (operation, bytes of its buffer) of all that a training step starts, by axis; of axes of one rank, nothing."""
        self._mesh.started()
        self._actor.run_step(1, self._microbatches, 0.0)
        return self._mesh.started()

    def evaluation(self) -> dict[str, list[tuple[str, int]]]:
        """Return the same for the evaluation of a batch."""
        self._mesh.started()
        self._actor.evaluate(1, self._microbatches)
        return self._mesh.started()

    def table(self) -> str:
        """Return what a training step sends over each axis by each operation, as text; bytes sent are those of transport `messages`."""
        rows = [("axis", "ranks", "operation", "calls", "MB of buffers", "MB sent")]
        for name, operations in self.training().items():
            axis, buffers = self._mesh[name], defaultdict(list)
            for operation, num_bytes in operations:
                buffers[operation].append(num_bytes)
            for operation, found in buffers.items():
                sent = sum(sent_bytes(operation, num_bytes, axis.size, axis.rank) for num_bytes in found)
                rows.append((name, str(axis.size), operation, str(len(found)), megabytes(sum(found)), megabytes(sent)))
        return aligned(rows)


class _EmptyActor(Actor):
    """No loss, and no gradients whose norm could be taken."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.gradients.counted = []

    def _losses(self) -> Iterator[tuple[int, int, torch.Tensor]]:
        return iter(())

    def _update(self, action: Action, work: Any) -> None:
        work.result.skipped, work.result.num_tokens, work.result.grad_norm = False, 1, 0.0
        super()._update(action, work)


class _EmptyStage(Stage):
    """A stage whose items only start what they declare."""

    def _build(self) -> list[list[Item]]:
        axes = {axis.name: axis for axis in (self.tp, self.core and self.core.axis) if axis}
        batch, tokens, width = self.activation().shape
        whole = self.shard.size if self.first and self.shard.sequence else 1  # the embedding divides the sequence, behind itself
        shape, blocks = (batch, tokens * whole, width), []
        for number, block in enumerate(super()._build()):
            blocks.append([])
            for item in _leaves(block):
                reads_tokens = self.first and number == 0 and not blocks[0]
                empty = _EmptyItem(item, shape, self.dtype, axes, reads_tokens=reads_tokens)
                blocks[-1].append(empty)
                shape = empty.behind
        return blocks


def _leaves(block: Sequence[Item]) -> Iterator[Item]:
    """Yield the items that do something themselves."""
    for item in block:
        if isinstance(item, Residual):
            yield from _leaves(item.items)
        else:
            yield item


class _EmptyItem:
    """It starts what the real item would, and makes tensors of the right shape.

    In one go: two walks of a PAIR take turns at each yield, and an item that yields several times (spread attention, asynchronous
    tensor parallelism) would be interrupted by the other's. On one axis the order of the two is then not that of the real walk.
    """

    def __init__(self, item: Item, shape: Shape, dtype: torch.dtype, axes: Mapping[str, Any], *, reads_tokens: bool):
        self._traffic, self.behind = item.sends(shape, dtype.itemsize)
        self._shape, self._dtype, self._axes, self._reads_tokens = shape, dtype, axes, reads_tokens

    def forward(self, x: torch.Tensor | None, context: Any) -> Walk:
        self._start(self._traffic.forward)
        yield None
        return torch.empty(self.behind, dtype=self._dtype, device=META), None

    def backward(self, saved: None, grad_of_output: torch.Tensor | None, later: Later) -> Walk:
        self._start(self._traffic.backward)
        yield None
        return None if self._reads_tokens else torch.empty(self._shape, dtype=self._dtype, device=META)

    def _start(self, operations: Sequence[Started]) -> None:
        for operation, axis, num_bytes in operations:
            self._axes[axis].account.note(operation, num_bytes)
