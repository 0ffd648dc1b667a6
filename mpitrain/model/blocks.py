"""The blocks of a stage, as what computes them."""

from collections.abc import Sequence

from mpitrain.model.build_context import BuildContext
from mpitrain.model.recompute import Recomputed
from mpitrain.parallel.walk import Item
from mpitrain.parallel.zero.parameters import Parameter
from mpitrain.plan.declared.layer import Placed
from mpitrain.plan.division.stages import StagePlan

Blocks = list[list[Item]]


def blocks_of(stage: StagePlan, parameters: Sequence[Sequence[Parameter]], site: BuildContext) -> Blocks:
    """Return what computes each block. parameters: of each block."""
    built = [
        [item for layer in block for item in _built(layer, own, site)]
        for block, own in zip(stage.blocks, parameters)
    ]
    return joined(stage, built)


def joined(stage: StagePlan, blocks: Blocks) -> Blocks:
    """Join blocks that are computed again together: the first has all of its group, others none."""
    for group in stage.groups:
        blocks[group[0]] = [Recomputed([blocks[block] for block in group])]
        blocks[group[0] + 1 : group[-1] + 1] = [[] for _ in group[1:]]
    return blocks


def _built(placed: Placed, parameters: Sequence[Parameter], site: BuildContext) -> list[Item]:
    own = {parameter.name.removeprefix(placed.prefix): parameter for parameter in parameters}
    return placed.layer.items(own, site)
