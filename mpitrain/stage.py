"""One pipeline stage: a slice of the decoder with its parameters, its gradient buckets, and what each microbatch left behind."""

from dataclasses import dataclass, replace

import torch

from mpitrain.comm.mesh import Axis
from mpitrain.config import Config
from mpitrain.model import recipe
from mpitrain.model.decoder import decoder_block, embedding, head
from mpitrain.model.history import History
from mpitrain.model.parameters import Allocate, Parameter, flat_buffer, initialise
from mpitrain.model.recipe import Products, Walk
from mpitrain.model.segments import Rotary
from mpitrain.parallel.context import ContextAttention, context_attention
from mpitrain.slicing import EMBEDDING, WHOLE, Shard, num_stages, partial_kinds, parts_of, specs_of


@dataclass
class Microbatch:
    """What a stage needs to know of a microbatch besides its input: tokens on the first stage, targets on the last. [B, T] each.

    start, history: of a segment of a sequence, its first position, and the keys and values of the segments before it.
    """

    tokens: torch.Tensor | None = None
    targets: torch.Tensor | None = None
    start: int = 0
    history: History | None = None


@dataclass
class Bucket:
    """Gradients that are reduced together. `grads` is one flat buffer; a tied bucket has one such buffer per use on this rank.

    over: the axis they are summed over before the data axis: `tied`, `tp` or `kv`.
    """

    grads: list[torch.Tensor]
    over: str | None = None

    @property
    def tied(self) -> bool:
        return self.over == "tied"


class Stage:
    """The blocks, parameters and stashes of stage `index` of a model.

    allocate: gives the memory of the gradient buckets.  embedding: the tied embedding, if another stage of this rank owns it.
    tp, cp: the tensor- and the context-parallel axis; without them, the stage has all of every layer, and the whole sequence.
    segments: into how many segments a microbatch's sequence is cut; microbatch `index` is then segment index % segments of one.
    """

    def __init__(
        self,
        config: Config,
        index: int,
        device: torch.device,
        allocate: Allocate | None = None,
        embedding: torch.Tensor | None = None,
        segments: int = 1,
        tp: Axis | None = None,
        cp: Axis | None = None,
    ):
        self.config, self.index, self.device, self.embedding, self.segments = config, index, device, embedding, segments
        self.tp = tp if tp is not None and tp.size > 1 else None
        self.shard = Shard(tp.rank, tp.size, config.parallel.sequence) if self.tp else WHOLE
        self.core = spread_attention(config, cp) if cp is not None and cp.size > 1 else None
        self.first, self.last = index == 0, index == num_stages(config) - 1
        self.dtype = torch.float64 if config.precision.compute == "fp64" else torch.float32
        self.parts = parts_of(config, index)
        self._create(allocate)
        self.blocks = self._build()
        self.stashes: dict[int, list] = {}  # by microbatch: what forward left for backward
        self.products: dict[int, list[list[Products]]] = {}  # by microbatch and block: what the backward for inputs left for weights
        self.histories: dict[int, History] = {}  # by microbatch, of which the last segment isn't done
        self.losses: dict[int, torch.Tensor] = {}
        initialise(self.owned, config.run.seed)

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
        for bucket in self.buckets:
            for grad in bucket.grads:
                grad.zero_()

    def forward(self, index: int, x: torch.Tensor | None, microbatch: Microbatch) -> Walk:
        """Run microbatch `index` through the stage: return the output [B, T, D], or None on the last stage, which keeps the loss.

        Without gradients enabled nothing is stashed.
        """
        stash = []
        microbatch = self._segment(index, microbatch)
        for block in self.blocks:
            x, saved = yield from recipe.forward(block, x, microbatch)
            stash.append(saved)
        if torch.is_grad_enabled():
            self.stashes[index] = stash
        elif (index + 1) % self.segments == 0:
            self.histories.pop(index // self.segments, None)
        if not self.last:
            return x
        self.losses[index] = x.detach()
        return None

    def backward(self, index: int, grad: torch.Tensor | None, part: int | None) -> Walk:
        """Run the backward of a microbatch, or one part of it, from the gradient of the output; return that of the input.

        Gradients are added to the buckets. What the forward left is freed on the way.
        """
        parts = range(len(self.parts)) if part is None else [part]
        stash = self.stashes[index]
        for number in parts:
            for block in reversed(self.parts[number]):
                grad = yield from recipe.backward(self.blocks[block], stash[block], grad)
        if parts[-1] == len(self.parts) - 1:
            del self.stashes[index]
            if index % self.segments == 0:
                self.histories.pop(index // self.segments, None)
        return grad

    def input_backward(self, index: int, grad: torch.Tensor | None) -> Walk:
        """Run the backward for inputs: as `backward`, but the weight gradients of matrices are left for `weight_backward`."""
        stash = self.stashes.pop(index)
        later: list[list[Products]] = [[] for _ in self.blocks]
        for block in reversed(range(len(self.blocks))):
            grad = yield from recipe.backward(self.blocks[block], stash.pop(), grad, later[block].append)
        self.products[index] = later
        if index % self.segments == 0:
            self.histories.pop(index // self.segments, None)
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

    def _segment(self, index: int, microbatch: Microbatch) -> Microbatch:
        """Tell a segment where it starts and what came before it; segments of a sequence come in ascending order."""
        if self.segments == 1:
            return microbatch
        start = index % self.segments * (self.config.data.sequence // self.segments)
        return replace(microbatch, start=start, history=self.histories.setdefault(index // self.segments, {}))

    @property
    def num_stashes(self) -> int:
        """Microbatches of which activations are held, for their backward or for their weight gradients."""
        return len(self.stashes) + len(self.products)

    def _create(self, allocate: Allocate | None) -> None:
        """Create the parameters: weights in one buffer, gradients in one buffer per bucket; what is summed over other axes apart."""
        blocks = specs_of(self.config, self.index, self.shard)
        tied = self.config.model.tied
        self._by_block = [[Parameter(spec) for spec in block] for block in blocks]
        every = [parameter for block in self._by_block for parameter in block]
        self.owned = [p for i, p in enumerate(every) if p.name not in {before.name for before in every[:i]}]  # a tied one once
        if self.embedding is not None:
            self.owned = [p for p in self.owned if p.name != EMBEDDING]
        _, views = flat_buffer([p.spec for p in self.owned], self.dtype, self.device)
        data = {parameter.name: view for parameter, view in zip(self.owned, views)}
        if tied and (self.first or self.last):
            self.embedding = data.setdefault(EMBEDDING, self.embedding)
        for parameter in every:
            parameter.data = data[parameter.name]
        self.buckets: list[Bucket] = []
        for part in self.parts:
            ours = [p for block in part for p in self._by_block[block] if not p.spec.partial and not (tied and p.name == EMBEDDING)]
            self.buckets.append(self._bucket(ours, allocate))
        uses = [p for p in every if tied and p.name == EMBEDDING]
        if uses:
            self.buckets.append(Bucket([self._bucket([use], allocate).grads[0] for use in uses], "tied"))
        for copies in partial_kinds(self.config, self.index):
            ours = [p for p in every if p.spec.partial and p.spec.copies == copies]
            self.buckets.append(self._bucket(ours, allocate, "tp" if copies == self.shard.size else "kv"))

    def _bucket(self, parameters: list[Parameter], allocate: Allocate | None, over: str | None = None) -> Bucket:
        memory, views = flat_buffer([p.spec for p in parameters], self.dtype, self.device, allocate)
        for parameter, view in zip(parameters, views):
            parameter.grad = view
        return Bucket([memory], over)

    def _build(self) -> list[list[recipe.Item]]:
        rotary = Rotary(self.config.model.width // self.config.model.heads, self.positions, self.dtype, self.device)
        inner = self._by_block[self.first : len(self._by_block) - self.last]
        blocks = [decoder_block(parameters, rotary, self.tp, self.shard.sequence, self.core) for parameters in inner]
        if self.first:
            blocks.insert(0, embedding(self._by_block[0][0], self.tp, self.shard.sequence))
        if self.last:
            blocks.append(head(*self._by_block[-1], self.tp, self.shard.sequence))
        return blocks


def spread_attention(config: Config, cp: Axis) -> ContextAttention:
    """Return the attention over `cp` of the heads that a rank of tp has."""
    model, parallel = config.model, config.parallel
    kv_heads = max(1, model.kv_heads // parallel.tp)
    return context_attention(cp, parallel.context, config.data.sequence, model.heads // parallel.tp, kv_heads)
