"""What a layer says of itself, once: shapes, memory, FLOPs, what it sends. model/layers/ has the layers.

Integers only. Buckets, stages and their balance, predictions and checkpoints follow from it; from
the items that a layer builds, what is computed.
"""

from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from mpitrain.plan.declared import probabilities
from mpitrain.plan.declared.dropout_sites import mask_bytes
from mpitrain.plan.declared.parameters import NormKind, Spec, itemsizes_of, product_flops
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.declared.traffic import Traffic
from mpitrain.plan.declared.work import PartWork, work_by_parameters


def is_loss(name: str) -> bool:
    """Return whether a metric of a layer is a sum over tokens that is reported as a mean."""
    return name.endswith("_loss")


class Working(NamedTuple):
    """Most bytes of a layer's computation, beside what it keeps, what it is given and what it hands on."""

    forward: int
    backward: int


class Layer(Protocol):
    """A part of a block, or an end of the model. Counts are of one token or of one microbatch on one rank.

    The defaults are those of a layer of products that treats each position alone. A layer of a
    user's own may inherit from this class, or have its methods only.
    """

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the numbers that it makes besides its output (Context.record_metric,
        parallel/microbatch.py). A loss is a sum over tokens, and its name ends with `_loss`.
        """
        return ()

    @abstractmethod
    def parameters(self) -> tuple[Spec, ...]:
        """Return the whole parameters, by names within the block, in the order of the forward."""

    def flops(self, sequence: int) -> float:
        """Return the model FLOPs of a token in a training step: 6 for each weight of a product,
        forward and backward. By these, layers are divided over stages.

        A lookup is no product.

        For causal attention 6 T D besides: half of the 12 T D of PaLM (arXiv:2204.02311, appendix
        B), because half of the scores are masked. Recomputation isn't counted; of what isn't a
        product with a weight, selective recomputation is taken to run the forward, a third, again.
        """
        return product_flops(self.parameters())

    @abstractmethod
    def kept(self, sizes: "Sizes", segment: int) -> int:
        """Return the bytes that the forward of a segment (of a sequence that is cut, else 0) leaves
        for the backward.
        """

    @abstractmethod
    def left(self, sizes: "Sizes") -> int:
        """Return the bytes that a backward for inputs (I) leaves for the one for weights (W)."""

    @abstractmethod
    def working(self, sizes: "Sizes") -> Working:
        """Return what its forward and its backward work with; that frees what was kept only as it goes."""

    def history(self, sizes: "Sizes") -> int:
        """Return the bytes that a segment of a sequence leaves for later segments."""
        return 0

    def cache_bytes(self, positions: int, itemsize: int) -> int | None:
        """Return the bytes of the keys and values of a text that it caches for generation."""
        return 0

    @abstractmethod
    def traffic(self, sizes: "Sizes") -> tuple[Traffic, ...]:
        """Return what each of its items starts for a microbatch, in the order of the forward.

        Rows to experts are counted as if tokens chose evenly.
        """

    def work(self, layout: StepLayout, load: float) -> PartWork | None:
        """Return what it computes, sends and keeps, for predictions of a step's time.

        None: what follows from its parameters and FLOPs (work_of).
        load: rows of the rank whose experts have most, over the mean.
        """
        return None

    @abstractmethod
    def items(self, own: Mapping[str, Any], site: Any) -> list[Any]:
        """Build what computes: the items of a walk (parallel/walk.py), of parameters by name.

        site: where (model/build_context.py).
        """


Block = tuple[Layer, ...]


def cache_bytes_of(layer: Layer, positions: int, itemsize: int) -> int | None:
    """Return layer.cache_bytes(); None: it has no such method, and each token needs the whole text anew."""
    declared = getattr(layer, "cache_bytes", None)
    return None if declared is None else declared(positions, itemsize)


def work_of(layer: Layer, layout: StepLayout, load: float, width: int) -> PartWork:
    """Return the work of a layer; of one that declares none, by its parameters and FLOPs.

    width: of the residual stream.
    """
    declare = getattr(layer, "work", None)
    declared: PartWork | None = None if declare is None else declare(layout, load)
    if declared is not None:
        return declared
    specs = layer.parameters()
    core = max(0.0, layer.flops(layout.sequence) - product_flops(specs))
    return work_by_parameters(specs, core, layout, width)


class Placed(NamedTuple):
    """A layer of a model, and what the names of its parameters begin with."""

    layer: Layer
    prefix: str

    def parameters(self) -> list[Spec]:
        return [spec.named(self.prefix + spec.name) for spec in self.layer.parameters()]


def _key(block: Block) -> Hashable:
    try:
        hash(block)
    except TypeError:
        return tuple(map(id, block))
    return block


@dataclass(frozen=True)
class ModelLayers:
    """A model: what comes first, blocks of layers, what comes last.

    A stage may begin and end between two layers of a block.
    """

    first: Layer
    blocks: tuple[Block, ...]
    last: Layer

    def row(self) -> list[tuple[int, Placed]]:
        """Return all layers between the ends, each with the number of its block."""
        return [
            (number, Placed(layer, f"blocks.{number}."))
            for number, block in enumerate(self.blocks)
            for layer in block
        ]

    @property
    def ends(self) -> tuple[Placed, Placed]:
        return Placed(self.first, ""), Placed(self.last, "")

    @cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """The blocks that differ, in the order of their first ones, and how many there are of each."""
        first: dict[Hashable, Block] = {}
        for block, key in zip(self.blocks, self._keys):
            first.setdefault(key, block)
        counts = Counter(self._keys)
        return tuple((block, counts[key]) for key, block in first.items())

    @cached_property
    def kind_of_block(self) -> tuple[int, ...]:
        """The number of each block's kind."""
        numbers = {key: number for number, key in enumerate(dict.fromkeys(self._keys))}
        return tuple(numbers[key] for key in self._keys)

    @cached_property
    def _keys(self) -> list[Hashable]:
        """What is equal of blocks that are alike; a layer of a user's own may be like itself alone."""
        return [_key(block) for block in self.blocks]

    def parameters(self) -> Iterator[tuple[Spec, int]]:
        """Yield the parameters of the kinds of blocks and of the ends, whole, and how many are like each."""
        for block, count in self.kinds:
            yield from ((spec, count) for layer in block for spec in layer.parameters())
        ends = {spec.name: spec for end in (self.first, self.last) for spec in end.parameters()}
        yield from ((spec, 1) for spec in ends.values())  # tied ones once

    def flops(self, sequence: int) -> float:
        """Return the model FLOPs of a token in a training step, see Layer.flops."""
        ends = sum(end.flops(sequence) for end in (self.first, self.last))
        return self.block_flops(sequence) + ends

    def block_flops(self, sequence: int) -> float:
        """Return those of the blocks, without the ends of the model."""
        return sum(count * sum(layer.flops(sequence) for layer in block) for block, count in self.kinds)

    def core_flops(self, sequence: int) -> float:
        """Return those of the blocks that are in no product with a weight: attention proper."""
        products = (
            count * product_flops(layer.parameters()) for block, count in self.kinds for layer in block
        )
        return self.block_flops(sequence) - sum(products)


@dataclass(frozen=True)
class Sizes:
    """What formulas of memory are given: how much of a microbatch, in `segments`, one rank has, and where."""

    config: ResolvedConfig
    segments: int = 1
    on_gpu: bool = False

    @property
    def tp(self) -> int:
        return self.config.parallel.tp

    @property
    def length(self) -> int:
        """Positions of a sequence."""
        return self.config.data.sequence // (self.config.parallel.cp * self.segments)

    @property
    def positions(self) -> int:
        """Of a microbatch."""
        return self.config.batch.micro * self.length

    @property
    def shared(self) -> int:
        """Positions of the residual stream."""
        return self.positions // (self.tp if self.config.parallel.sequence else 1)

    @property
    def itemsize(self) -> int:
        """Bytes of an activation."""
        return itemsizes_of(self.config)[0]

    @property
    def wide(self) -> int:
        """Bytes of a number in fp32 at least."""
        return max(4, self.itemsize)

    @property
    def factor(self) -> int:
        """Bytes of a number of which the weight gradients of a block are made."""
        return 1 if self.config.precision.compute == "fp8" else self.itemsize

    @property
    def selective(self) -> bool:
        """Whether what is cheap to make again isn't kept."""
        return self.config.memory.recompute == "selective"

    @property
    def regathers(self) -> bool:
        """Whether what is gathered for products isn't kept, but gathered again in the backward."""
        return self.config.parallel.regather

    @property
    def core_alone(self) -> bool:
        """Whether attention proper is a segment of its own: selective recomputation keeps its result."""
        parallel = self.config.parallel
        return parallel.cp > 1 or (parallel.tp > 1 and parallel.async_tp)

    def gated(self, itemsize: int, silu: bool = True) -> int:
        """Return what a gated product and the product after it keep of a hidden unit.

        gate, up, silu(gate), and what is multiplied, `itemsize` bytes a number.
        silu: another activation isn't kept, but made again.
        """
        if self.selective:
            return 2 * self.itemsize
        made_again = self.config.run.compile is True or self.on_gpu or not silu
        return (2 if made_again else 3) * self.itemsize + itemsize

    def probabilities(self, heads: int, width: int) -> int:
        """Return what attention in bf16 on a CPU keeps of a microbatch besides. width: of a head.

        None in fp16, where it depends on the processor, and a plan knows none.
        """
        config = self.config
        ours = config.precision.compute in ("bf16", "fp8") and not self.on_gpu and config.parallel.cp == 1
        masked = config.data.separates or self.segments > 1
        if self.selective or masked or not ours or not probabilities.are_kept(self.length, width):
            return 0
        return config.batch.micro * heads * probabilities.count(self.length) * self.itemsize

    def norm(self, width: int) -> int:
        """Return what a norm keeps of a position: what has the norm 1, and its factor, fp32 at least."""
        return width * self.itemsize + self.wide

    def normed(self, width: int, itemsize: int, kind: NormKind = NormKind.RMS) -> int:
        """Return what a norm and the products after it keep of their input, `itemsize` bytes a number."""
        if self.regathers:
            position_bytes = width * self.itemsize if kind is NormKind.NONE else self.norm(width)
            return self.shared * position_bytes
        return self.normed_once(width, itemsize, kind)

    def normed_once(self, width: int, itemsize: int, kind: NormKind = NormKind.RMS) -> int:
        """Return the same of products whose input is never gathered again."""
        if kind is NormKind.NONE:
            return self.positions * width * itemsize
        in_pieces = self.tp > 1  # a message is between norm and product
        norm = (self.shared if in_pieces else self.positions) * self.norm(width)
        return norm + (0 if self.selective and not in_pieces else self.positions * width * itemsize)

    def stream(self, width: int) -> int:
        """Return the bytes of one tensor of the residual stream, [B, T, D]."""
        return self.shared * width * self.itemsize

    def gathered(self, width: int) -> int:
        """Return the same of all ranks of tp, which a layer gathers before it computes and scatters after."""
        return self.positions * width * self.itemsize if self.tp > 1 else 0

    def regathered(self, width: int) -> int:
        """Return the bytes that a backward makes again of a layer's input.

        The whole, and of this rank's slice what has the norm 1 and what was gathered.
        """
        return self.gathered(width) + 2 * self.stream(width) if self.regathers else 0

    def dropped(self, width: int) -> int:
        """Return what dropout of the residual stream works with: its result, and masks."""
        return self.stream(width) + mask_bytes(self.shared * width, self.on_gpu)

    @property
    def in_pieces(self) -> bool:
        """Whether attention makes its probabilities itself, some queries at a time: in 16 bits on a CPU."""
        return self.itemsize == 2 and not self.on_gpu
