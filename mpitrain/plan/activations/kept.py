"""What a microbatch leaves behind in a stage between its forward and its backward: formulas, in bytes.

Those of layers are the layers' own (model/layers/); here is what belongs to a stage. With
memory.recompute = full the inputs of blocks are kept, n D each, with every-k those of groups. What
is held is counted in actor/memory_meter.py.
"""

from collections.abc import Callable, Collection
from functools import cache, cached_property
from typing import Any, TypeVar

from mpitrain.plan.declared.layer import Layer, Sizes, Working, cache_bytes_of
from mpitrain.plan.division.sequence import OF_KIND, SequencePlacement
from mpitrain.plan.division.stages import StagePlan

Result = TypeVar("Result")


def _cached(formula: Callable[..., Result]) -> Callable[..., Result]:
    """Return a formula of a layer that computes once for each, by its id: it may have no hash."""
    results: dict[tuple[Any, ...], Result] = {}

    def of_layer(layer: Layer, *where: int) -> Result:
        key = id(layer), *where
        if key not in results:
            results[key] = formula(layer, *where)
        return results[key]

    return of_layer


class Activations:
    """The formulas of one stage of the model."""

    def __init__(self, stage: StagePlan, sizes: Sizes, offloaded: bool = False):
        self.config = stage.config
        self.stage = stage
        self.sizes = sizes
        self.segments = sizes.segments
        self.blocks = range(len(stage.blocks))
        self.offloaded = offloaded or self.config.memory.offload in ("activations", "all")
        # computed once: a program asks again for each microbatch and part. The stage holds its layers
        self.kept_by: Callable[[Layer, int], int] = _cached(lambda layer, segment: layer.kept(sizes, segment))
        self.left_by: Callable[[Layer], int] = _cached(lambda layer: layer.left(sizes))
        self.working_of: Callable[[Layer], Working] = _cached(lambda layer: layer.working(sizes))
        self.kept = cache(self._kept)
        self.left = cache(self._left_of)

    @cached_property
    def sent(self) -> "Activations":
        """The formulas of a microbatch that is offloaded."""
        return self if self.offloaded else Activations(self.stage, self.sizes, offloaded=True)

    def _kept(self, segment: int = 0, first: int = 0) -> int:
        """Return what the forward of a segment leaves on the device.

        first: of the parts of the stage, in the order of the backward, the first that has anything:
        others are still to be walked by the forward, or were walked by the backward. What all
        blocks share is there all the time.
        """
        blocks = [block for part in self.stage.parts[first:] for block in part]
        inner = 0 if self.offloaded else self._inner(segment, blocks)
        history = self._history() if self.segments > 1 else 0  # for later segments
        ends = sum(self.kept_by(layer, segment) for layer in self._layers(blocks, inner=False))
        return inner + history + self._mask(segment) * self.sizes.itemsize + self._documents(segment) + ends

    def input(self) -> int:
        """Return what is kept of a microbatch whose forward is run again: the input of the stage."""
        return 0 if self.stage.first else self.sizes.stream(self.config.model.width)

    def on_host(self, segment: int = 0) -> int:
        """Return what it leaves in host memory instead."""
        return self._inner(segment, self.blocks) if self.offloaded else 0

    def _left_of(self, first: int = 0, end: int | None = None) -> int:
        """Return what I leaves for W: factors of products, and gradients of vectors.

        first, end: of the parts of the stage, those that I has walked, and W hasn't; None: to the
        last.
        """
        blocks = [block for part in self.stage.parts[first:end] for block in part]
        specs = self.stage.specs(self.stage.shard(0))
        vectors = sum(spec.numel for block in blocks for spec in specs[block] if spec.group == "vector")
        return vectors * self.sizes.itemsize + sum(map(self.left_by, self._layers(blocks)))

    def returned(self, segment: int) -> int:
        """Return what waits of gradients of earlier keys and values after a segment's backward.

        First as one tensor.
        """
        return (self.segments if segment == self.segments - 1 else segment) * self._history()

    def _inner(self, segment: int, blocks: Collection[int]) -> int:
        """What blocks keep, without the ends of the model."""
        if self.config.memory.recompute in ("full", "every-k"):
            number = sum(group[0] in blocks for group in self.stage.groups)
            return number * self.sizes.shared * self.config.model.width * self.sizes.itemsize
        return sum(self.kept_by(layer, segment) for layer in self._layers(blocks, inner=True))

    def _history(self) -> int:
        return sum(layer.history(self.sizes) for layer in self._layers(self.blocks))

    @property
    def _attends(self) -> bool:
        """Whether a layer of the stage has keys and values; of one that doesn't say, yes.

        The layer of further tokens has some, and caches none.
        """
        layers = self._layers(self.blocks)
        return any(layer.history(self.sizes) or cache_bytes_of(layer, 1, 1) != 0 for layer in layers)

    def _layers(self, blocks: Collection[int], inner: bool | None = None) -> list[Layer]:
        """Return the layers of blocks. inner: only those between the ends of the model, or of the ends."""
        wanted = [block for block in blocks if inner is None or (block in self.stage.inner) == inner]
        return [placed.layer for block in wanted for placed in self.stage.blocks[block]]

    def _documents(self, segment: int) -> int:
        """Numbers of documents of whole sequences, and their order: attention over cp keeps them, and
        makes its masks again.

        Learned positions keep them, too. Where activations are offloaded they stay here. Once for
        all segments: the first is the last to go.
        """
        data, parallel = self.config.data, self.config.parallel
        of_tiles = parallel.cp > 1 and self.config.memory.recompute not in ("full", "every-k")
        ends = self._layers(self.blocks, inner=False)
        of_all = self.offloaded or any(getattr(layer, "positions", 0) for layer in ends)
        if not data.separates or not (of_tiles or of_all) or (of_all and segment):
            return 0
        placement = SequencePlacement(OF_KIND[parallel.context], data.sequence, parallel.cp)
        with_order = parallel.cp > 1 and placement.divides_documents
        return self.config.batch.micro * data.sequence * 8 * (2 if with_order else 1)

    def _mask(self, segment: int) -> int:
        """Numbers that are added to the scores, unless these are causal alone.

        Over cp they are made tile by tile, and not counted; on a CPU documents need none. A stage
        without attention keeps none.
        """
        separate = self.config.data.separates
        if separate and not self.sizes.on_gpu:
            return 0
        if self.config.parallel.cp > 1 or not (separate or self.segments > 1) or not self._attends:
            return 0
        return (self.config.batch.micro if separate else 1) * self.sizes.length**2 * (segment + 1)
