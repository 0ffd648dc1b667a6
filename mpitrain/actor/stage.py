"""One pipeline stage: a slice of the decoder with its parameters, its gradient buckets, and what each microbatch left behind."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from mpitrain.actor.stage_state import StageState
from mpitrain.comm.mesh import Axis
from mpitrain.config import Config
from mpitrain.layout.buckets import parts_of
from mpitrain.layout.parameters import WHOLE, Shard, num_stages
from mpitrain.layout.recompute_groups import groups_of
from mpitrain.model.decoder import decoder_block, embedding, head
from mpitrain.model.offload import EVERYTHING, Host, Keeping, Shelf
from mpitrain.model.recompute import Recomputed
from mpitrain.model.segments import Rotary
from mpitrain.model.sequence_history import History, mask
from mpitrain.parallel import walk as recipe
from mpitrain.parallel.context.attention import ContextAttention, context_attention
from mpitrain.parallel.precision import TYPES
from mpitrain.parallel.walk import Products, Walk
from mpitrain.parallel.zero.shards import Sharding, Weights


@dataclass
class Microbatch:
    """What a stage needs to know of a microbatch besides its input: tokens on the first stage, targets on the last. [B, T] each.

    documents: the number of each position's document in the whole sequence, [B, T], if attention stays within documents.
    start, segment, history: of a segment of a sequence, its first position, its number, and the keys and values of those before it.
    visible: what attention adds to its scores, if causality isn't all there is to it; made by the stage.
    keeping: what blocks keep of it for their backward, and where; made by the stage.
    """

    tokens: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    documents: torch.Tensor | None = None
    start: int = 0
    segment: int = 0
    history: History | None = None
    visible: torch.Tensor | None = None
    keeping: Keeping = EVERYTHING


class Stage:
    """The blocks, parameters and stashes of stage `index` of a model.

    shardings: how the state of each domain is divided over data ranks.  embedding: the tied one, if another stage of this rank has it.
    tp, cp: the tensor- and the context-parallel axis; without them, the stage has all of every layer, and the whole sequence.
    segments: into how many segments a microbatch's sequence is cut; microbatch `index` is then segment index % segments of one.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        device: torch.device,
        shardings: Mapping[str, Sharding] | None = None,
        embedding: Weights | None = None,
        segments: int = 1,
        tp: Axis | None = None,
        cp: Axis | None = None,
    ):
        self.config, self.index, self.device, self.segments = config, index, device, segments
        self.tp = tp if tp is not None and tp.size > 1 else None
        self.shard = Shard(tp.rank, tp.size, config.parallel.sequence) if self.tp else WHOLE
        self.core = spread_attention(config, cp) if cp is not None and cp.size > 1 else None
        self.first, self.last = index == 0, index == num_stages(config) - 1
        self.dtype = TYPES[config.precision.compute]
        self.parts = parts_of(config, index)
        self.state = StageState(config, index, self.shard, device, shardings, embedding)
        self.blocks = self._grouped(self._build())
        self.contexts: dict[int, Microbatch] = {}  # by microbatch, of which a part of the forward is done and another isn't
        self.stashes: dict[int, list] = {}  # by microbatch: what forward left for backward
        self.products: dict[int, list[list[Products]]] = {}  # by microbatch and block: what the backward for inputs left for weights
        self.histories: dict[int, History] = {}  # by microbatch, of which the last segment isn't done
        self.losses: dict[int, torch.Tensor] = {}
        self.host = Host(device) if config.memory.offload in ("activations", "all") else None
        self.shelves: dict[int, Shelf] = {}  # by microbatch: what waits in host memory

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the sequence that this rank has, [T]."""
        if self.core is None:
            return torch.arange(self.config.data.sequence)
        return torch.from_numpy(self.core.placement.positions(self.core.axis.rank))

    def activation(self) -> torch.Tensor:
        """Return an uninitialised [B, T, D] buffer for what comes from a neighbouring stage."""
        divided = self.segments * self.config.parallel.cp * (self.shard.size if self.shard.sequence else 1)
        shape = (self.config.batch.micro, self.config.data.sequence // divided, self.config.model.width)
        return torch.empty(shape, dtype=self.dtype, device=self.device)

    def zero_grad(self) -> None:
        """Start a step: no gradients, no losses."""
        self.losses = {}
        self.state.zero_grad()

    def forward(self, index: int, x: torch.Tensor | None, microbatch: Microbatch, part: int | None = None) -> Walk:
        """Run microbatch `index` through the stage, or one part of it (counted from the first block): return the output [B, T, D].

        The last stage keeps the loss and returns None. Without gradients enabled nothing is stashed.
        """
        parts = range(len(self.parts)) if part is None else [part]
        stash = self.stashes[index] if index in self.stashes and parts[0] else []
        microbatch = self.contexts.pop(index, None) or self._context(index, microbatch)
        for number in parts:
            number = len(self.parts) - 1 - number
            yield from self._arrive(number)
            for block in self.parts[number]:
                x, saved = yield from recipe.forward(self.blocks[block], x, self._kept(index, block, microbatch))
                stash.append(saved)
        done = parts[-1] == len(self.parts) - 1
        if not done:
            self.contexts[index] = microbatch
        if torch.is_grad_enabled():
            self.stashes[index] = stash
        elif done and (index + 1) % self.segments == 0:
            self.histories.pop(index // self.segments, None)
        if not (done and self.last):
            return x
        self.losses[index] = x.detach()
        return None

    def _arrive(self, part: int) -> Walk:
        """Wait for the weights of a part of the backward, if they are on their way."""
        for weights in self.state.weights_of[part]:
            if weights.arriving is not None:
                yield weights.arriving
                weights.arriving = None

    def backward(self, index: int, grad: torch.Tensor | None, part: int | None) -> Walk:
        """Run the backward of a microbatch, or one part of it, from the gradient of the output; return that of the input.

        Gradients are added to the buckets. What the forward left is freed on the way.
        """
        parts = range(len(self.parts)) if part is None else [part]
        stash = self.stashes[index]
        for number in parts:
            yield from self._arrive(number)
            for block in reversed(self.parts[number]):
                self._fetch(index, block)
                grad = yield from recipe.backward(self.blocks[block], stash[block], grad)
        if parts[-1] == len(self.parts) - 1:
            self._forget(index)
        return grad

    def input_backward(self, index: int, grad: torch.Tensor | None, part: int | None = None) -> Walk:
        """Run the backward for inputs, or one part: as `backward`, but the gradients of matrices are left for `weight_backward`."""
        parts = range(len(self.parts)) if part is None else [part]
        stash, later = self.stashes[index], self.products.setdefault(index, [[] for _ in self.blocks])
        for number in parts:
            yield from self._arrive(number)
            for block in reversed(self.parts[number]):
                self._fetch(index, block)
                grad = yield from recipe.backward(self.blocks[block], stash.pop(), grad, later[block].append)
        if parts[-1] == len(self.parts) - 1:
            self._forget(index)
        return grad

    def weight_backward(self, index: int, part: int | None) -> Walk:
        """Add the weight gradients that `input_backward` left, or one part of them, and free what they were made of."""
        parts = range(len(self.parts)) if part is None else [part]
        later = self.products[index]
        for number in parts:
            for block in reversed(self.parts[number]):
                while later[block]:
                    yield None
                    later[block].pop(0)()
        if parts[-1] == len(self.parts) - 1:
            del self.products[index]

    def _context(self, index: int, microbatch: Microbatch) -> Microbatch:
        """Tell a segment where it starts and what came before it, in ascending order; and what is visible, once for all blocks."""
        documents = microbatch.documents
        if self.core is not None or (documents is None and self.segments == 1):
            return microbatch
        length = (self.config.data.sequence if documents is None else documents.shape[-1]) // self.segments
        segment = index % self.segments
        start = segment * length
        history = self.histories.setdefault(index // self.segments, {}) if self.segments > 1 else None
        visible = mask(start, start + length, documents, self.dtype, self.device)
        return replace(microbatch, start=start, segment=segment, history=history, visible=visible)

    def _kept(self, index: int, block: int, microbatch: Microbatch) -> Microbatch:
        """Tell a block what to keep, and where. Embedding and head keep all: their backward comes at once, or they keep next to nothing."""
        inner = self.first <= block < len(self.blocks) - self.last
        if not inner or not torch.is_grad_enabled():
            return microbatch
        shelf = None
        if self.host is not None:
            stays = [self.rotary.cos, self.rotary.sin, *(x for x in (microbatch.visible, microbatch.documents) if x is not None)]
            shelf = self.shelves.setdefault(index, Shelf(self.host))
            shelf.stays.update((x.untyped_storage().data_ptr(), x) for x in stays)
            shelf.block = block
        return replace(microbatch, keeping=Keeping(self.config.memory.recompute == "selective", shelf))

    def _fetch(self, index: int, block: int) -> None:
        if index in self.shelves:
            self.shelves[index].fetch(block)

    def _forget(self, index: int) -> None:
        """Forget a microbatch whose backward is done."""
        del self.stashes[index]
        self.shelves.pop(index, None)
        if index % self.segments == 0:
            self.histories.pop(index // self.segments, None)

    @property
    def num_stashes(self) -> int:
        """Microbatches of which activations are held, for their backward or for their weight gradients."""
        return len({*self.stashes, *self.products})

    def _grouped(self, blocks: list[list[recipe.Item]]) -> list[list[recipe.Item]]:
        """Join blocks that are computed again together: the first of a group stands for all, the others are empty."""
        for group in groups_of(self.config, self.index):
            blocks[group[0]] = [Recomputed([blocks[block] for block in group])]
            blocks[group[0] + 1 : group[-1] + 1] = [[] for _ in group[1:]]
        return blocks

    def _build(self) -> list[list[recipe.Item]]:
        self.rotary = rotary = Rotary(self.config.model.width // self.config.model.heads, self.positions, self.dtype, self.device)
        inner = self.state.by_block[self.first : len(self.state.by_block) - self.last]
        layout = (self.tp, self.shard.sequence, self.core, self.config.parallel.async_tp, self.config.precision.compute == "fp8")
        blocks = [decoder_block(parameters, rotary, *layout) for parameters in inner]
        if self.first:
            blocks.insert(0, embedding(self.state.by_block[0][0], self.tp, self.shard.sequence))
        if self.last:
            blocks.append(head(*self.state.by_block[-1], self.tp, self.shard.sequence))
        return blocks


def spread_attention(config: Config, cp: Axis) -> ContextAttention:
    """Return the attention over `cp` of the heads that a rank of tp has."""
    model, parallel = config.model, config.parallel
    kv_heads = max(1, model.kv_heads // parallel.tp)
    heads, width = model.heads // parallel.tp, model.width // model.heads
    return context_attention(cp, parallel.context, config.data.sequence, heads, kv_heads, width)
