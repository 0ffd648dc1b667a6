"""Which blocks of a stage are computed again together (`memory.recompute`). Integers and names only."""

import math

from mpitrain.config import Config
from mpitrain.layout.parameters import num_stages, specs_of


def groups_of(config: Config, stage: int) -> list[range]:
    """Return the groups of a stage's blocks that are computed again together; embedding and head are in none.

    With ZeRO-3 a group is one block: weights are fetched and dropped block by block.
    """
    if config.memory.recompute not in ("full", "every-k"):
        return []
    inner = inner_blocks(config, stage)
    every = 1
    if config.memory.recompute == "every-k" and config.parallel.zero < 3:
        every = config.memory.every or max(1, round(math.sqrt(len(inner))))
    return [inner[i : i + every] for i in range(0, len(inner), every)]


def inner_blocks(config: Config, stage: int) -> range:
    """Return the numbers of a stage's blocks without embedding and head."""
    return range(stage == 0, len(specs_of(config, stage)) - (stage == num_stages(config) - 1))
