"""One stage of pipeline parallelism: its blocks, and what each microbatch left for its backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from mpitrain.actor.contexts import Contexts
from mpitrain.actor.stage_state import StageState
from mpitrain.kernels.dropout import DropoutDraw
from mpitrain.kernels.streams import streams_of
from mpitrain.model.blocks import Blocks, blocks_of
from mpitrain.model.build_context import BuildContext
from mpitrain.model.offload import OffloadStore
from mpitrain.parallel import walk
from mpitrain.parallel.microbatch import Context, DecodingCache, KeepAll, Keeping, Microbatch, ignored
from mpitrain.parallel.walk import Walk, WeightGradients
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.parallel.zero.shards import Weights, ZeroGroup
from mpitrain.plan.division.stages import StagePlan
from mpitrain.plan.routing import Routes
from mpitrain.schedules.actions import OFFLOAD


class Stage:
    """A stage of the model at work: forwards and backwards of microbatches, whole or part by part.

    It begins with initial weights. Construction is collective over the axes of `zero_groups`.
    embedding: the tied one's weights, if another stage of this rank has them.
    build: makes `blocks`, what computes.
    state: its parameters.
    contexts: makes what blocks are given.
    offload_store: host memory for what blocks keep.
    offloads_all: of all microbatches, not only of those that O names.
    """

    def __init__(
        self,
        plan: StagePlan,
        site: BuildContext,
        zero_groups: Mapping[str, ZeroGroup] | None = None,
        embedding: Weights | None = None,
        build: Callable[[StagePlan, Sequence[Sequence[Parameter]], BuildContext], Blocks] = blocks_of,
    ):
        self.plan = plan
        shard = plan.shard(*(axis.rank if axis else 0 for axis in (site.tp, site.experts)))
        self.state = StageState(plan, shard, site.device, zero_groups, embedding, site.training)
        self.blocks = build(plan, self.state.by_block, site)
        self.contexts = Contexts(site)
        self.offloads_all = plan.config.memory.offload in ("activations", "all")
        offloads_some = any(action.kind == OFFLOAD for row in site.plan.table.ranks for action in row)
        self.offload_store: OffloadStore | None = None
        if self.offloads_all or offloads_some:
            self.offload_store = OffloadStore(streams_of(site.device), site.constants())
        self.offloaded: set[int] = set()  # microbatches that are, where not all are
        self.parts = plan.parts
        self.first = plan.first
        self.last = plan.last
        self._selective = plan.config.memory.recompute == "selective"
        # of microbatches of which a part of the forward is done and another isn't
        self._under_way: dict[int, Context] = {}
        self.stashes: dict[int, list] = {}  # by microbatch: what forward left for backward
        # by microbatch that is recomputed: what its forward is given again
        self.inputs: dict[int, tuple[torch.Tensor | None, Microbatch, dict[str, Any]]] = {}
        # by microbatch and block: what the backward for inputs left
        self.deferred_weight_gradients: dict[int, list[list[WeightGradients]]] = {}

    def forward(
        self,
        index: int,
        x: torch.Tensor | None,
        microbatch: Microbatch,
        part: int | None = None,
        record_metric: Callable[[str, torch.Tensor], None] = ignored,
        scale: float = 1.0,
        routes: Routes | None = None,
        dropout: DropoutDraw | None = None,
        keep: bool = True,
    ) -> Walk:
        """Run microbatch `index` through the stage, or one part of it, and return the output.

        The output is [B, T, D], of the last stage the loss, without targets the logits. Without
        gradients enabled nothing is stashed.
        part: counted from the first block.
        record_metric: takes what layers make besides their outputs.
        scale: of the loss.
        routes: of its tokens, to experts.
        dropout: whose masks it has; None: nothing is dropped.
        keep: without, only the input is kept, for recompute().
        """
        parts = range(len(self.parts)) if part is None else [part]
        stash = self.stashes[index] if index in self.stashes and parts[0] else []
        lent = dict(record_metric=record_metric, scale=scale, routes=routes, dropout=dropout)
        keep = keep or not torch.is_grad_enabled()
        if not keep and not parts[0]:
            self.inputs[index] = x, microbatch, {**lent, "record_metric": ignored}
        context = self._under_way.pop(index, None) or replace(self.contexts.of(index, microbatch), **lent)
        for number in parts:
            number = len(self.parts) - 1 - number
            yield from self._arrive(number)
            for block in self.parts[number]:
                own = self._kept(index, block, context, keep)
                x, saved = yield from walk.forward(self.blocks[block], x, own)
                stash.append(saved if keep else None)
        done = parts[-1] == len(self.parts) - 1
        if not done:
            self._under_way[index] = context
        if not torch.is_grad_enabled():
            if done:
                self.contexts.evaluated(index)
        elif keep:
            self.stashes[index] = stash
        return x

    def recompute(self, index: int, part: int | None) -> Walk:
        """Run the forward of a microbatch again, or a part, and keep what its backward needs.

        Autograd records in both walks, as it does of recomputed blocks (model/recompute.py).
        """
        x, microbatch, lent = self.inputs.pop(index)
        made = yield from self.forward(index, x, microbatch, part, **lent)
        if index in self._under_way:
            self.inputs[index] = made, microbatch, lent

    def decode(self, microbatch: Microbatch, cache: DecodingCache) -> Walk:
        """Run the next tokens of a text through the whole model, and return the last logits [B, 1, V].

        Without gradients. On one rank of cp, and with all stages here.
        documents: of the microbatch, are of all positions so far.
        cache: of the tokens before them; these are added to it.
        """
        context = self.contexts.decoding(microbatch, cache)
        x = None
        *blocks, head = self.blocks
        for block in blocks:
            x, _ = yield from walk.forward(block, x, context)
        cache.length += microbatch.tokens.shape[1]
        logits_B1V, _ = yield from walk.forward(head, x[:, -1:], context)
        return logits_B1V

    def backward(
        self, index: int, grad: torch.Tensor | None, part: int | None, inputs_only: bool = False
    ) -> Walk:
        """Run the backward of a microbatch, or one part of it; return the gradient of the input.

        grad: of the output.
        inputs_only: the gradients of matrices are left for `weight_backward`.
        Gradients are added to the buckets. What the forward left is freed on the way.
        """
        parts = range(len(self.parts)) if part is None else [part]
        stash = self.stashes[index]
        if inputs_only:
            deferred = self.deferred_weight_gradients.setdefault(index, [[] for _ in self.blocks])
        for number in parts:
            yield from self._arrive(number)
            for block in reversed(self.parts[number]):
                if self.offload_store is not None:
                    self.offload_store.fetch(index, block)
                later = deferred[block].append if inputs_only else None
                grad = yield from walk.backward(self.blocks[block], stash.pop(), grad, later)
        if self._is_last(parts):
            del self.stashes[index]
            self.contexts.forget(index)
            self.offloaded.discard(index)
            if self.offload_store is not None:
                self.offload_store.forget(index)
        return grad

    def weight_backward(self, index: int, part: int | None) -> Walk:
        """Add, and free, the weight gradients that a backward for inputs left, or a part."""
        parts = range(len(self.parts)) if part is None else [part]
        later = self.deferred_weight_gradients[index]
        for number in parts:
            for block in reversed(self.parts[number]):
                while later[block]:
                    yield None
                    later[block].pop(0).add()
        if self._is_last(parts):
            del self.deferred_weight_gradients[index]

    def _arrive(self, part: int) -> Walk:
        """Wait for the weights of a part of the backward, if they are on their way."""
        for weights in self.state.weights_of[part]:
            if weights.arriving is not None:
                yield weights.arriving
                weights.arriving = None

    def _kept(self, index: int, block: int, context: Context, keep: bool) -> Context:
        """Tell a block what to keep and where. The ends keep all: it is little, or used at once."""
        if not keep or block not in self.plan.inner or not torch.is_grad_enabled():
            return context
        keeping: Keeping = KeepAll(self._selective)
        if self.offload_store is not None and (self.offloads_all or index in self.offloaded):
            keeping = self.offload_store.away(index, block, self._selective, self.contexts.stays(context))
        return replace(context, keeping=keeping)

    def _is_last(self, parts: Sequence[int]) -> bool:
        return parts[-1] == len(self.parts) - 1
