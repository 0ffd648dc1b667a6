"""Activation recomputation: how many blocks are recomputed together, where nobody has said.

The number k with which the rank that holds most holds least.

    inputs of groups     ceil(blocks / k) of each microbatch in flight
    one group            k blocks with all that they keep, once: while its backward runs
    gradients            of a group, where they are lent: it is one part of the backward

One block keeps some twenty times its input, so the square root of the number of blocks, best where
a block keeps no more than its input (arXiv:1604.06174, section 4.1), holds more than one block at a
time does, unless many microbatches are in flight.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from mpitrain.plan.activations.kept import Activations
from mpitrain.plan.activations.peak import peak_of
from mpitrain.plan.declared.layer import Sizes
from mpitrain.plan.declared.parameters import itemsizes_of
from mpitrain.plan.division.domains import lends_gradients
from mpitrain.plan.division.stages import StagePlan
from mpitrain.schedules.table import Table


def with_every(stages: Sequence[StagePlan], table: Table, sizes: Sizes) -> tuple[StagePlan, ...]:
    """Return the stages with the number of blocks that is recomputed together."""
    given = sizes.config.memory.every
    numbers = [given] if given else _candidates({len(stage.inner) for stage in stages})
    candidates = [tuple(replace(stage, every=number) for stage in stages) for number in numbers]
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda stages: _most(stages, table, sizes))


def _candidates(lengths: Collection[int]) -> list[int]:
    """Return the numbers worth trying: the least for each number of groups. lengths: blocks of stages."""
    return sorted({-(-length // groups) for length in lengths for groups in range(1, length + 1)} | {1})


def _most(stages: Sequence[StagePlan], table: Table, sizes: Sizes) -> int:
    """Return what the microbatches of the pipeline rank that holds most take at once, and what they lend."""
    formulas = [Activations(stage, sizes) for stage in stages]
    lent = [_lent(stage) for stage in stages]
    rank_formulas = (
        {number: formulas[number % table.depth] for number in numbers} for numbers in table.chunks
    )
    return max(
        sum(peak_of(actions, table, own)) + max(lent[number % table.depth] for number in own)
        for actions, own in zip(table.ranks, rank_formulas)
    )


def _lent(stage: StagePlan) -> int:
    """Return the bytes of gradients that a stage lends at once: of two parts of its backward, at most."""
    config = stage.config
    if not lends_gradients(config.parallel):
        return 0
    specs = stage.specs(stage.shard(0))
    lengths = [sum(spec.numel for block in part for spec in specs[block]) for part in stage.parts]
    return max(map(sum, zip(lengths, [*lengths[1:], 0]))) * itemsizes_of(config)[1]


def recompute_line(stages: Sequence[StagePlan]) -> str:
    """Say how many blocks are recomputed together, if nobody has said."""
    memory = stages[0].config.memory
    if memory.recompute != "every-k" or memory.every:
        return ""
    return f"memory.every = {stages[0].every}: recomputing this many blocks together needs least memory"
