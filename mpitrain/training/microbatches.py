"""The microbatches of one rank, of the tokens of its data-parallel rank."""

import torch

from mpitrain.actor.actor import Actor
from mpitrain.parallel.microbatch import Microbatch


def needs_tokens(actor: Actor, separator: int | None) -> bool:
    """Tell whether a rank has to see tokens: stages in the middle look only for documents."""
    return actor.first or actor.last or separator is not None


def microbatches_of(actor: Actor, tokens: torch.Tensor, separator: int | None) -> list[Microbatch]:
    """Return the microbatches of a step. tokens: of its sequences on this data-parallel rank, [batch, sequence + 1]."""
    if not needs_tokens(actor, separator):
        return [Microbatch() for _ in range(actor.plan.num_microbatches * actor.table.segments)]
    return actor.cut(tokens, separator)
