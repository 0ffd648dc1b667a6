"""What one computation of a stage holds while it runs: more than what is left when it is over.

    forward of a block   what blocks before have left
                         | what it keeps, even if that is dropped then | what it works with
    backward of a group  what blocks before have left
                         | what is recomputed, block by block          | what each block works with

A group is what is recomputed together: one block with memory.recompute = "full", k of them with
"every-k". In a backward for inputs the factors of weight gradients stay, too.
"""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import NamedTuple

from mpitrain.plan.activations.kept import Activations
from mpitrain.plan.declared.layer import Placed
from mpitrain.plan.declared.probabilities import ADDED_AT_ONCE


class Inside(NamedTuple):
    """The most bytes of a microbatch at once: what autograd keeps or recomputes; and with working memory."""

    recorded: int
    working: int


class Transients:
    """What the computations of one stage hold."""

    def __init__(self, formulas: Activations):
        self.formulas = formulas
        self.stage = formulas.stage
        self.sizes = formulas.sizes
        self.of = cache(self._of)  # asked again for each microbatch

    def _of(self, kind: str, segment: int, part: int | None) -> Inside:
        """Return what a computation (F, B, I, W or R) of a segment holds, all of its microbatch's counted."""
        if kind == "W":
            return Inside(self.formulas.left(), self.formulas.left() + self._product(self.stage.blocks))
        count = len(self.stage.parts)
        if kind in ("F", "R"):
            blocks = self._blocks(range(count) if part is None else [count - 1 - part])
            steps = [self._forward(block, segment) for block in blocks]
        else:
            blocks = self._blocks(range(count) if part is None else [part])
            steps = [self._backward(group, segment, split=kind == "I") for group in self._groups(blocks)]
        return Inside(*map(max, zip(*steps))) if steps else Inside(0, 0)

    def dropped(self, segment: int) -> Inside:
        """Return what a forward holds of which only the input is kept: one block at a time."""
        blocks = range(len(self.stage.blocks))
        recorded = [self._recorded(block, segment) for block in blocks]
        working = [self._working_forward(block) for block in blocks]
        begin = self.formulas.input()
        return Inside(begin + max(recorded), begin + max(map(sum, zip(recorded, working))))

    def _blocks(self, parts: Sequence[int]) -> list[int]:
        return [block for part in parts for block in self.stage.parts[part]]

    def _groups(self, blocks: Sequence[int]) -> list[Sequence[int]]:
        """Return blocks as the backward computes them: what is recomputed together, any other alone."""
        groups = [group for group in self.stage.groups if group[0] in blocks]
        grouped = {block for group in groups for block in group}
        return [*groups, *([block] for block in blocks if block not in grouped)]

    def _forward(self, block: int, segment: int) -> Inside:
        before = self._kept_before(block + 1, segment)
        recorded = self._recorded(block, segment) if self._recomputed(block) else 0
        return Inside(before + recorded, before + recorded + self._working_forward(block))

    def _backward(self, group: Sequence[int], segment: int, *, split: bool) -> Inside:
        """Play a group: it is recomputed from its first layer to its last, and then walked back."""
        begin = self._kept_before(group[0], segment)
        if split:
            later = self.stage.blocks[group[-1] + 1 :]
            begin += sum(self.formulas.left_by(placed.layer) for block in later for placed in block)
        layers = [placed for block in group for placed in self.stage.blocks[block]]
        recomputed = self._recomputed(group[0])
        kept = [self.formulas.kept_by(placed.layer, segment) for placed in layers]
        at = begin + (self._inputs(group[0]) if recomputed else 0)
        # from host memory, for this computation
        fetched = self.formulas.offloaded and not recomputed and group[0] in self.stage.inner
        recorded = at if fetched else at + sum(kept)
        most = at + sum(kept)
        left = 0
        for number in reversed(range(len(layers))):
            layer = layers[number].layer
            before = at + sum(kept[:number])
            working = self.formulas.working_of(layer)
            left_by = self.formulas.left_by(layer)
            most = max(
                most,
                before + kept[number] + left + working.backward,
                before + kept[number] + working.forward * recomputed,
                before + left + left_by + self._product([[layers[number]]]),
            )
            left += left_by * split
        return Inside(recorded, most + self._stream)

    # ------------------------------------------------------------ of blocks

    def _kept_before(self, end: int, segment: int) -> int:
        """Return what the blocks before block `end` have left, and what all blocks share."""
        count = len(self.stage.parts)
        total = self.formulas.kept(segment, count)
        for block in range(end):
            if self._recomputed(block):
                total += self._inputs(block)
            elif not (self.formulas.offloaded and block in self.stage.inner):
                total += self._recorded(block, segment)
        return total

    def _working_forward(self, block: int) -> int:
        return max(self.formulas.working_of(placed.layer).forward for placed in self.stage.blocks[block])

    def _recorded(self, block: int, segment: int) -> int:
        return sum(self.formulas.kept_by(placed.layer, segment) for placed in self.stage.blocks[block])

    def _inputs(self, block: int) -> int:
        """Return what is kept of a block that is recomputed: its input, if a group begins with it."""
        begins = any(group[0] == block for group in self.stage.groups)
        return self._stream if begins and not self.formulas.offloaded else 0

    def _recomputed(self, block: int) -> bool:
        return bool(self.stage.groups) and block in self.stage.inner

    def _product(self, blocks: Sequence[Sequence[Placed]]) -> int:
        """Return the bytes of the weight gradient of which most is made beside its sum.

        A GPU adds as it multiplies. So does a CPU in fp32 where MKL is fast: there, by 16 MiB at
        most, this is too much, for a plan doesn't know where it will run.
        """
        if self.sizes.on_gpu:
            return 0
        counts = [self.stage.largest_of(placed.layer) for block in blocks for placed in block]
        return min(ADDED_AT_ONCE, max(counts, default=0)) * self.sizes.itemsize

    @cached_property
    def _stream(self) -> int:
        return self.sizes.stream(self.formulas.config.model.width)
