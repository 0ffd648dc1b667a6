"""What a rank would start in a step, in order and to the byte, from the configuration alone.

The actor itself walks the rank's program, on axes on which nothing travels, with items that compute
nothing, and start what their layers declare (Layer.traffic, plan/declared/layer.py).
"""

import json
import signal
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch

from mpitrain.actor.actor import Actor
from mpitrain.actor.partner_copies import CopyExchange
from mpitrain.actor.step_totals import Measure, Totals
from mpitrain.actor.uncomputed import Uncomputed
from mpitrain.cluster.processes import signal_when_parent_ends
from mpitrain.cluster.status_board import RankStatus
from mpitrain.comm.base.axis_operations import AUTO_SHARED
from mpitrain.comm.base.nodes import nodes_of
from mpitrain.comm.base.wire import sent_bytes, sent_over_nodes, transport_on_a_node
from mpitrain.comm.standins.recipe import At, Event, Start, encoded
from mpitrain.comm.standins.rehearsal import Script, SilentMesh
from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.model.blocks import Blocks, joined
from mpitrain.model.build_context import BuildContext
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.microbatch import Context, Microbatch
from mpitrain.parallel.walk import Later, Walk, WeightGradients
from mpitrain.plan.declared.formatting import aligned, megabytes
from mpitrain.plan.declared.layer import Layer
from mpitrain.plan.declared.traffic import Started, Traffic
from mpitrain.plan.division.stages import StagePlan
from mpitrain.plan.plan import Plan
from mpitrain.plan.predict.snapshot_bytes import sent_copy_bytes

META = torch.device("meta")  # shapes without memory


class Rehearsal:
    """One rank of a layout, without MPI and without memory."""

    def __init__(self, plan: Plan, rank: int):
        self._plan = plan
        self._mesh = SilentMesh(rank, plan.axes.of(rank), plan.axes.carried)
        standins = dict(place=_Marks(self._mesh.script), build=empty_blocks, measure=_Nothing())
        with Uncomputed():
            self._actor = Actor(plan, self._mesh, META, **standins)
        self._microbatches = [Microbatch()] * (plan.table.copies * plan.table.num_microbatches)
        self._copy_bytes = sent_copy_bytes(plan)

    def recipe(self) -> list[Event]:
        """Return what a training step starts and waits for, in order, and between which instructions.

        Of axes of one rank, nothing. What a step before it has left under way is waited for, too.
        """
        self._mesh.script.take()
        for step in (1, 2):
            self._run_step(step)
            events = self._mesh.script.take()
        return events

    def training(self) -> dict[str, list[tuple[str, int]]]:
        """Return (operation, bytes of its buffer) that a step starts, by axis of several ranks."""
        self._mesh.script.take()
        self._run_step(1)
        return _by_axis(self._mesh.script.take())

    def _run_step(self, step: int) -> None:
        """Run a step that follows one after which the state was copied."""
        if self._actor.partner_copies is not None:
            own, partners = (torch.empty(self._copy_bytes, dtype=torch.uint8, device=META) for _ in range(2))
            self._actor.partner_copies.give(CopyExchange(own, partners, lambda: None))
        with Uncomputed():
            self._actor.run_step(step, self._microbatches, 0.0)

    def sent(self) -> dict[str, int]:
        """Return the bytes that a training step sends over each axis, the way that `way` says."""
        return {
            name: sum(self._sent(operation, num_bytes, name) for operation, num_bytes in operations)
            for name, operations in self.training().items()
        }

    def evaluation(self) -> dict[str, list[tuple[str, int]]]:
        """Return the same for the evaluation of a batch."""
        self._mesh.script.take()
        with Uncomputed():
            self._actor.evaluate(1, self._microbatches)
        return _by_axis(self._mesh.script.take())

    def table(self) -> str:
        """Return what a training step sends over each axis by each operation, as text, by way()."""
        rows = [("axis", "ranks", "operation", "calls", "MB of buffers", "MB sent")]
        for name, operations in self.training().items():
            axis = self._mesh[name]
            buffers = defaultdict(list)
            for operation, num_bytes in operations:
                buffers[operation].append(num_bytes)
            for operation, requests in buffers.items():
                sent = sum(self._sent(operation, num_bytes, name) for num_bytes in requests)
                counts = str(len(requests)), megabytes(sum(requests)), megabytes(sent)
                rows.append((name, str(axis.size), operation, *counts))
        return aligned(rows)

    def way(self) -> str:
        """Say by which transport the bytes of the table are sent."""
        keys = self._plan.config.comm
        if self._on_gpu:
            return "by messages, from and to buffers of GPUs"
        if keys.node_ranks:
            unknown = "what shared memory of a node would read isn't distinguished"
            return f"by messages, on nodes of {keys.node_ranks} ranks; {unknown}"
        reads = "read from the memory of the others"
        ways = {
            "auto": f"on one node: sums and gathers of {AUTO_SHARED >> 10} KiB and more are {reads} "
            "(shared), the rest are messages",
            "shared": f"on one node: sums and gathers are {reads} (shared), the rest are messages",
            "collectives": "by MPI's collectives; what goes to one rank by messages",
            "messages": "by messages",
        }
        return f"comm.transport = {json.dumps(keys.transport)}, {ways[keys.transport]}"

    @property
    def _on_gpu(self) -> bool:
        return self._plan.config.run.device == "cuda"

    def _sent(self, operation: str, num_bytes: int, name: str) -> int:
        axis = self._mesh[name]
        ranks = self._plan.axes.of(self._mesh.rank)[name]
        keys = self._plan.config.comm
        if not keys.node_ranks and not self._on_gpu:
            way = transport_on_a_node(keys.transport, operation, num_bytes)
            return sent_bytes(operation, num_bytes, axis.size, axis.rank, transport=way)
        nodes = None
        if keys.node_ranks and keys.levels == "auto":
            nodes = nodes_of([rank // keys.node_ranks for rank in ranks])
        if nodes is not None:
            return sent_over_nodes(operation, num_bytes, nodes, axis.rank)
        return sent_bytes(operation, num_bytes, axis.size, axis.rank)


def _by_axis(events: Iterable[Event]) -> dict[str, list[tuple[str, int]]]:
    rows_by_axis = defaultdict(list)
    for event in events:
        if isinstance(event, Start):
            rows_by_axis[event.axis].append((event.operation, event.num_bytes))
    return dict(rows_by_axis)


class _Marks(RankStatus):
    """Notes in the script where the rank is in its program."""

    def __init__(self, script: Script):
        super().__init__()
        self._script = script

    def moved(self, step: int, position: int, what: str) -> None:
        """Note the next instruction."""
        self._script.events.append(At(position, what))


class _Nothing(Measure):
    """Of tensors without memory nothing is read; as if of one token, so that an update follows."""

    def numbers(self, tensors: Iterable[torch.Tensor]) -> list[float]:
        return []

    def squares(self, grads: Iterable[torch.Tensor]) -> list[float]:
        return []

    def count(self, targets: Iterable[torch.Tensor]) -> int:
        return 0

    def total(self, parts: list[Totals]) -> Totals:
        return parts[0]._replace(count=1.0)


def empty_blocks(stage: StagePlan, parameters: Sequence, site: BuildContext) -> Blocks:
    """Return blocks whose items only start what their layers declare."""
    axes_of_items = site.tp, site.cp, site.experts, site.tokens, site.experts_near, site.experts_far
    axes = {axis.name: axis for axis in axes_of_items if axis}
    like = torch.empty(site.plan.activation_shape(), dtype=site.dtype, device=META)
    blocks: Blocks = []
    for block in stage.blocks:
        items = [declared for placed in block for declared in _declared_by(placed.layer, site.plan)]
        blocks.append([_EmptyItem(declared, like, axes) for declared in items])
    if stage.first:
        blocks[0][0].reads_tokens = True
    return joined(stage, blocks)


def _declared_by(layer: Layer, plan: Plan) -> tuple[Traffic, ...]:
    """Return what a layer sends. Raises ConfigError for one of a plug-in that doesn't say."""
    try:
        declared = layer.traffic
    except AttributeError:
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        raise ConfigError(
            f"{name} declares no traffic(sizes), what its items send; needed before a run; "
            "define it (docs/extending/layer.md)"
        ) from None
    return declared(plan.sizes)


class _EmptyItem:
    """It starts what the real item would, takes turns where that does (parallel/walk.py), and makes
    tensors of the residual stream's shape, of which those at the ends of a stage travel on.

    In a PAIR of items that compute piece by piece (asynchronous tensor parallelism, experts,
    model.mtp, parallel.regather) each walk's order is exact, and theirs together is not.
    """

    def __init__(self, traffic: Traffic, like: torch.Tensor, axes: Mapping[str, Any]):
        self._traffic = traffic
        self._like = like
        self._axes = axes
        self.reads_tokens = False

    def forward(self, x: torch.Tensor | None, context: Context) -> Walk:
        yield from self._start(self._traffic.forward)
        return self._like.new_empty(self._like.shape), None

    def backward(self, saved: None, grad_of_output: torch.Tensor | None, later: Later) -> Walk:
        has_weights = self._traffic.has_weights
        if has_weights and self._traffic.backward:
            later(WeightGradients([]))
        yield from self._start(self._traffic.backward)
        if has_weights:
            later(WeightGradients([]))
        return None if self.reads_tokens else self._like.new_empty(self._like.shape)

    def _start(self, operations: Sequence[Started]) -> Walk:
        for operation, axis, num_bytes in operations:
            yield self._axes[axis].start(None, operation, num_bytes)
        if not operations:
            yield None


def main() -> None:
    """Read a resolved configuration; write each rank's recipe as a line of JSON for dryrun/."""
    signal_when_parent_ends(signal.SIGKILL)  # stopped, it would stay when its rank is killed
    config = sys.stdin.buffer.read()
    # empty: who asked is gone
    plan = plan_of(msgspec.json.decode(config, type=Config)) if config else None
    for rank in range(plan.axes.grid.size if plan else 0):
        sys.stdout.buffer.write(msgspec.json.encode(encoded(Rehearsal(plan, rank).recipe())) + b"\n")
